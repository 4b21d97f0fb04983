apt-get update
apt-get install -y --no-install-recommends clang-19='1:19.1.7-*' lld-19='1:19.1.7-*' \
    libclang-rt-19-dev-wasm32='1:19.1.7-*' wasi-libc='0.0~git20220510*'
