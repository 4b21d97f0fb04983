cargo install wit-bindgen-cli --version 0.57.1 --locked --no-default-features --features c --debug --root tools
