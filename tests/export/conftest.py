import os
import tempfile

# Where transformers copies the code of a folder that it loads; read when it is imported.
os.environ.setdefault("HF_MODULES_CACHE", tempfile.mkdtemp(prefix="modules-"))
