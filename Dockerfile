# The `lap` command in a container, for the CPU (the default) or for CUDA:
#
#   docker build -t lap .
#   docker build -t lap --build-arg DEVICE=cuda .
#   docker run --rm -it -v "$PWD:/work" lap train quickstart
#   docker run --rm -it --gpus all --ipc=host -v "$PWD:/work" lap train gpt561m_5L
FROM python:3.12-slim

# cpu or cuda. torch's default wheels for Linux bring the CUDA libraries along; those of the cpu index are much smaller.
ARG DEVICE=cpu
# Packages beyond the base install: eval, hf, search, watch, tensorboard, wandb.
ARG EXTRAS=all

# A compiler for torch.compile, and the sandbox for generated code.
RUN apt-get update && apt-get install -y --no-install-recommends g++ bubblewrap && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir uv
WORKDIR /opt/lap
COPY pyproject.toml setup.py README.md LICENSE ./
COPY lapcli lapcli
COPY recipes recipes
RUN if [ "$DEVICE" = cpu ]; then \
        uv pip install --system --no-cache torch torchvision --index-url https://download.pytorch.org/whl/cpu; \
    fi && uv pip install --system --no-cache ".[$EXTRAS]"
WORKDIR /work
ENTRYPOINT ["lap"]
CMD ["--help"]
