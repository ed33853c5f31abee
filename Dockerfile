# One image for the control plane and the command line. Sidecars run Envoy's own image.
#
#   docker build --build-arg SOURCE_DATE_EPOCH="$(git log -1 --format=%ct)" --tag YOUR-REGISTRY/vllm-priority:0.1.0 .
#
# The same commit gives the same files: versions and hashes come from the locks, and times from SOURCE_DATE_EPOCH
# (with BuildKit's --output type=image,rewrite-timestamp=true the layers' times too). Pin the base by digest with
# --build-arg PYTHON_IMAGE=...@sha256:... where the last difference matters.
ARG PYTHON_IMAGE=docker.io/library/python:3.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG SOURCE_DATE_EPOCH=315532800
ENV SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH} PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PYTHONHASHSEED=0
WORKDIR /src
COPY requirements.lock requirements-dev.lock ./
RUN python -m venv --without-pip /opt/vllm-priority && \
    python -m pip --python /opt/vllm-priority/bin/python install --no-deps --no-compile --require-hashes -r requirements.lock
# Of the development lock, only what builds the wheel.
RUN awk '/^[a-z]/ { keep = /^(hatchling|packaging|pathspec|pluggy|trove-classifiers)==/ } keep' requirements-dev.lock > build.lock && \
    python -m venv /opt/build && \
    /opt/build/bin/python -m pip install --no-deps --require-hashes -r build.lock
COPY pyproject.toml README.md LICENSE ./
COPY control_plane control_plane
COPY envoy envoy
COPY lua lua
# Compiled here, since nothing can be written at run time; by hash, since a time would differ at every build.
RUN /opt/build/bin/python -m hatchling build --target wheel --directory dist && \
    python -m pip --python /opt/vllm-priority/bin/python install --no-deps --no-compile dist/*.whl && \
    python -m compileall -q --invalidation-mode unchecked-hash /opt/vllm-priority/lib

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="vllm-priority" \
      org.opencontainers.image.description="Request priorities on vLLM's scale-out routes: control plane and command line" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
COPY --from=build /opt/vllm-priority /opt/vllm-priority
ENV PATH=/opt/vllm-priority/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
# By number: Kubernetes cannot tell that a name is not root.
USER 65532:65532
EXPOSE 8080 8443
ENTRYPOINT ["vllm-priority"]
CMD ["--help"]
