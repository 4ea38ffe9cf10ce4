# CPU only. `docker run --rm IMAGE` runs the demonstration; `docker run --rm -p 8888:8888 IMAGE
# jupyter lab --ip 0.0.0.0` opens the notebooks.
FROM python:3.11-slim

WORKDIR /home/tfdp/tfdp_adaptive
COPY requirements/current.lock requirements/jupyter.lock requirements/
RUN python -m pip install --no-cache-dir --no-deps -r requirements/current.lock \
  && python -m pip install --no-cache-dir --no-deps -r requirements/jupyter.lock \
  && jupyter lab --version
COPY . .
RUN python -m pip install --no-cache-dir --no-deps --no-build-isolation . \
  && useradd --home-dir /home/tfdp tfdp && chown -R tfdp /home/tfdp
USER tfdp
ENV TF_CPP_MIN_LOG_LEVEL=2
CMD ["tfdp", "demo"]
