import os
import tempfile

# The folder where transformers copies the code of a model it loads; read at import.
os.environ.setdefault("HF_MODULES_CACHE", tempfile.mkdtemp(prefix="modules-"))
