rouse wit wit
npx componentize-js app.js -w wit -n module -o app.wasm
