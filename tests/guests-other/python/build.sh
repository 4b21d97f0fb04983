rouse wit wit
venv/bin/componentize-py -d wit -w module componentize app -o app.wasm
