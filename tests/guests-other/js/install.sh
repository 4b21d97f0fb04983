npm ci --ignore-scripts
