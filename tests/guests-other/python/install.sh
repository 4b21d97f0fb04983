python3 -m venv venv
venv/bin/pip install --require-hashes -r requirements.txt
