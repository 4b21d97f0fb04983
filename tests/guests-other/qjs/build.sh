rouse wit wit
sed -i '/wasi:io\/poll/d; /subscribe/d' wit/rouse.wit
npx componentize-qjs --sync -j app.js -w wit -n module -o app.wasm
