# Makes the certificates of the tests, in the present folder.
set -e
key="-newkey rsa:2048 -nodes"
openssl req -x509 $key -days 2 -subj /CN=authority -keyout ca.key -out ca.crt
openssl req -x509 $key -days 2 -subj /CN=other -keyout other.key -out other.crt
openssl req $key -subj /CN=localhost -keyout key.pem -out own.csr
cat > ca.conf <<END
[ca]
default_ca = own
[own]
database = index
serial = serial
new_certs_dir = .
default_md = sha256
policy = any
x509_extensions = names
unique_subject = no
[any]
commonName = supplied
[names]
subjectAltName = DNS:localhost
END
touch index
echo 02 > serial
sign="openssl ca -batch -config ca.conf -in own.csr -cert ca.crt -keyfile ca.key"
$sign -days 1 -out good.crt
$sign -startdate 20200101000000Z -enddate 20200102000000Z -out expired.crt
