npm install --ignore-scripts
