"""The page's looks: light and dark, wide, narrow and on paper."""

STYLE = """
:root{--bg:#fff;--fg:#1b1d22;--soft:#5b616e;--line:#d5d8de;--card:#f6f7f9;--link:#0b57a4;
--ok:#0a7a55;--mid:#946000;--bad:#b3261e;--none:#5b616e}
@media (prefers-color-scheme:dark){:root{--bg:#14161a;--fg:#e7e9ee;--soft:#a2a9b6;--line:#3a3f49;--card:#1d2026;
--link:#7db8f5;--ok:#4cc79b;--mid:#e2b04a;--bad:#f28b82;--none:#a2a9b6}}
*{box-sizing:border-box}
html{scroll-padding-top:1rem}
body{margin:0;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
overflow-wrap:anywhere}
header,main{max-width:76rem;margin:0 auto;padding:0 1.25rem}
header{padding-top:2rem}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .25rem}
h2{font-size:1.35rem;margin:2.5rem 0 .75rem;padding-bottom:.3rem;border-bottom:1px solid var(--line)}
h3{font-size:1.02rem;margin:1.5rem 0 .5rem}
h4{font-size:.9rem;margin:.8rem 0 .2rem}
p{margin:.3rem 0}
a{color:var(--link)}
nav{display:flex;flex-wrap:wrap;gap:.3rem 1.1rem;margin-top:1rem}
.counts{display:flex;flex-wrap:wrap;gap:.5rem;list-style:none;padding:0;margin:1rem 0 0}
.counts li{border:1px solid var(--line);border-left:4px solid currentColor;border-radius:4px;padding:.25rem .7rem;
background:var(--card)}
.counts b{font-size:1.15rem}
.s-reproduced{color:var(--ok)}.s-partly{color:var(--mid)}.s-not{color:var(--bad)}.s-not-run{color:var(--none)}
.wide{overflow-x:auto;border:1px solid var(--line);border-radius:6px}
.tables{display:flex;flex-wrap:wrap;gap:.2rem 2rem;align-items:flex-start}
article{max-width:100%;min-width:min(100%,17rem)}
article h3,article .fine{width:0;min-width:100%}
table{border-collapse:collapse;width:100%;font-size:.93rem;font-variant-numeric:tabular-nums;overflow-wrap:normal}
th,td{padding:.35rem .75rem;text-align:right;vertical-align:top;white-space:nowrap}
th:first-child,table.left th,table.left td{text-align:left}
thead th{background:var(--card);border-bottom:1px solid var(--line);vertical-align:bottom}
tbody tr+tr>*{border-top:1px solid var(--line)}
tbody th{font-weight:600}
tr.base>*{background:var(--card)}
td br+small,td small+br+small{line-height:1.35}
table.left td{white-space:normal;min-width:6rem}
small{font-size:.82rem;color:var(--soft)}
.gap{color:var(--soft)}
.fine{font-size:.85rem;color:var(--soft);margin:.5rem 0;padding-left:1.1rem}
p.fine{padding:0}
.claim{border:1px solid var(--line);border-left:4px solid currentColor;border-radius:6px;padding:.55rem .9rem;
margin:.55rem 0;background:var(--card)}
.claim>*{color:var(--fg)}
.claim>.fine{color:var(--soft)}
.claim ul{margin:.2rem 0;padding-left:1.1rem;font-size:.9rem}
summary{cursor:pointer}
.badge,.tag{font-size:.78rem;font-weight:600;border:1px solid currentColor;border-radius:99px;padding:.05rem .55rem;
white-space:nowrap}
.badge{margin-right:.3rem}
.s-reproduced .badge{color:var(--ok)}.s-partly .badge{color:var(--mid)}.s-not .badge{color:var(--bad)}
.s-not-run .badge{color:var(--none)}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,24rem),1fr));gap:1rem}
.grid.big{grid-template-columns:repeat(auto-fill,minmax(min(100%,34rem),1fr))}
figure{margin:0;border:1px solid var(--line);border-radius:6px;padding:.8rem;min-width:0}
figure svg,figure img{display:block;width:100%;height:auto;max-height:44rem;object-fit:contain}
figure.white img{background:#fff;border-radius:4px}
figcaption{font-size:.85rem;color:var(--soft)}
figcaption b{color:var(--fg)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.3rem 1.2rem;font-size:.93rem}
dt{font-weight:600}dd{margin:0;min-width:0}
main{padding-bottom:4rem}
@media (max-width:34rem){header,main{padding-left:.8rem;padding-right:.8rem}h1{font-size:1.5rem}dl{display:block}
dd{margin:0 0 .5rem}th,td{padding:.4rem .55rem}}
@media print{:root{--bg:#fff;--fg:#000;--soft:#444;--line:#bbb;--card:#fff}nav{display:none}body{font-size:10pt}
.wide{overflow:visible;border:0}th,td{white-space:normal;padding:.2rem .35rem}article,figure,.claim{break-inside:avoid}
h2,h3{break-after:avoid}}
""".strip()
