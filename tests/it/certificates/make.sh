#!/bin/sh
# Makes the certificates of tests/it/tls.rs again. They are valid for a hundred years and protect
# nothing, so their keys may be public.
set -eu
cd "$(dirname "$0")"
new="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 36500"
for ca in ca other-ca; do
    openssl req -x509 $new -keyout $ca.key -out $ca.crt -subj "/CN=rouse test $ca" \
        -addext basicConstraints=critical,CA:TRUE
done
# A server's certificate for localhost, signed by ca.
openssl req $new -keyout server.key -out server.csr -subj /CN=localhost
printf 'subjectAltName=DNS:localhost\nbasicConstraints=CA:FALSE\n' > server.ext
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 36500 \
    -extfile server.ext -out server.crt
# A careless administrator's certificate: self-signed, and a CA by default in openssl.
openssl req -x509 $new -keyout self-signed.key -out self-signed.crt -subj /CN=localhost \
    -addext subjectAltName=DNS:localhost
# Version 1, which `openssl x509 -req` makes without extensions.
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 36500 \
    -out version-1.crt
rm -f ./*.csr ./*.ext ./*.srl ca.key other-ca.key
