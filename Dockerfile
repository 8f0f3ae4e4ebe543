# The same two commands in a container, as a user without root rights:
#   docker build -t lockstep-gpt .
#   docker run --rm -it lockstep-gpt python3 scripts/dev.py train experiment=smoke
# With GPUs, and runs kept on the host:
#   docker run --rm -it --gpus all --ipc=host -v "$PWD/runs:/home/user/project/runs" lockstep-gpt
#
# To pin its content too: `docker buildx imagetools inspect python:3.13.7-slim-bookworm` prints the
# digest; add it to the tag as @sha256:... No registry could be asked here.
FROM python:3.13.7-slim-bookworm

# git: records a run's code revision; g++: for Inductor on CPUs (compile=true). Their versions come
# from the image's Debian.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 user \
    && mkdir /home/user/project \
    && chown user:user /home/user/project

USER user
WORKDIR /home/user/project

# Docs and tests come after the libraries, so changing them installs nothing. The index decides
# the build of torch (docs/troubleshooting.md): docker build --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL
COPY --chown=user:user pyproject.toml constraints.txt README.md LICENSE* ./
COPY --chown=user:user configs configs
COPY --chown=user:user engine engine
COPY --chown=user:user scripts scripts
COPY --chown=user:user src src
RUN python3 scripts/dev.py train --help > /dev/null
COPY --chown=user:user docs docs
COPY --chown=user:user tests tests

CMD ["python3", "scripts/dev.py", "train"]
