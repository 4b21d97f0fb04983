rouse wit wit
tools/bin/wit-bindgen c wit --world module
clang-19 --target=wasm32-wasi -mexec-model=reactor -O2 app.c module.c module_component_type.o -o app.wasm
