// Shows values at the pointer, and lets runs be hidden. Without scripts the page is complete, but without these two.
"use strict";
(() => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "status");
  document.body.append(tip);
  const hidden = new Set();
  const key = (experiment, run) => experiment + "\n" + run;
  const number = v => Number.isInteger(v) ? v.toLocaleString("en") : String(+v.toPrecision(4));

  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const chart = JSON.parse(figure.dataset.chart);
    const svg = figure.querySelector("svg");
    const box = svg.viewBox.baseVal;
    const dot = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    dot.setAttribute("r", "4");
    dot.setAttribute("class", "dot");
    dot.style.display = "none";
    svg.append(dot);
    const [left, top, right, bottom] = chart.box;
    const place = ([x, y]) => [
      left + (x - chart.x[0]) / (chart.x[1] - chart.x[0]) * (right - left),
      bottom - (y - chart.y[0]) / (chart.y[1] - chart.y[0]) * (bottom - top)];
    const leave = () => { tip.hidden = true; dot.style.display = "none"; };
    const show = event => {
      const outer = svg.getBoundingClientRect();
      const scale = Math.min(outer.width / box.width, outer.height / box.height);
      const dx = (outer.width - box.width * scale) / 2, dy = (outer.height - box.height * scale) / 2;
      const px = (event.clientX - outer.left - dx) / scale, py = (event.clientY - outer.top - dy) / scale;
      let best = null, near = 30;
      for (const line of chart.lines) {
        if (line.run && hidden.has(key(figure.dataset.experiment, line.run))) continue;
        for (const point of line.points) {
          const [x, y] = place(point);
          const distance = Math.hypot(x - px, y - py);
          if (distance < near) { near = distance; best = {line, point, x, y}; }
        }
      }
      if (!best) return leave();
      dot.setAttribute("cx", best.x);
      dot.setAttribute("cy", best.y);
      dot.setAttribute("fill", best.line.colour);
      dot.style.display = "";
      tip.replaceChildren();
      const name = document.createElement("b");
      name.textContent = best.line.name;
      tip.append(name);
      for (const text of [best.line.run, chart.xName + " " + number(best.point[0]),
                          chart.yName + " " + number(best.point[1])]) {
        if (!text) continue;
        const row = document.createElement("div");
        row.textContent = text;
        tip.append(row);
      }
      tip.hidden = false;
      const wide = tip.offsetWidth, width = document.documentElement.clientWidth;
      const x = outer.left + dx + best.x * scale, y = outer.top + dy + best.y * scale;
      tip.style.left = Math.max(4, Math.min(x + 12, width - wide - 4)) + scrollX + "px";
      tip.style.top = Math.max(4, y - tip.offsetHeight - 10) + scrollY + "px";
    };
    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerdown", show);
    svg.addEventListener("pointerleave", leave);
    figure.update = () => {
      for (const line of chart.lines) {
        const drawn = document.getElementById(line.id);
        if (drawn && line.run) drawn.style.display = hidden.has(key(figure.dataset.experiment, line.run)) ? "none" : "";
      }
    };
  }

  const remember = () => { try { sessionStorage.setItem("hidden runs", JSON.stringify([...hidden])); } catch {} };
  const update = () => {
    for (const figure of document.querySelectorAll("figure[data-chart]")) figure.update();
    for (const button of document.querySelectorAll("button[data-runs]")) {
      const runs = JSON.parse(button.dataset.runs);
      const shown = runs.filter(run => !hidden.has(key(button.dataset.experiment, run))).length;
      button.setAttribute("aria-pressed", shown ? "true" : "false");
    }
  };
  for (const button of document.querySelectorAll("button[data-runs]")) {
    button.disabled = false;
    button.addEventListener("click", () => {
      const hide = button.getAttribute("aria-pressed") === "true";
      for (const run of JSON.parse(button.dataset.runs))
        hidden[hide ? "add" : "delete"](key(button.dataset.experiment, run));
      update();
      remember();
    });
  }
  try { for (const one of JSON.parse(sessionStorage.getItem("hidden runs") || "[]")) hidden.add(one); } catch {}
  update();

  // Marks the section that the reader sees in the list of contents.
  const links = new Map([...document.querySelectorAll("nav a")].map(a => [a.hash.slice(1), a]));
  const seen = new IntersectionObserver(entries => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      const link = links.get(entry.target.id);
      if (link) link.setAttribute("aria-current", "true");
    }
  }, {rootMargin: "0px 0px -75% 0px"});
  for (const id of links.keys()) { const at = document.getElementById(id); if (at) seen.observe(at); }

  // Unfolds everything before printing: folded parts would be lost on paper.
  const folded = [];
  addEventListener("beforeprint", () => {
    for (const one of document.querySelectorAll("details:not([open])")) { folded.push(one); one.open = true; }
  });
  addEventListener("afterprint", () => { for (const one of folded.splice(0)) one.open = false; });
})();
