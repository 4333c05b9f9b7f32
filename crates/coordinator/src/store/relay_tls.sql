-- Version 6: where relays of ours are by TLS.
ALTER TABLE relay ADD COLUMN tls_port INTEGER; -- TCP; NULL: they are not
ALTER TABLE relay ADD COLUMN tls_pin TEXT;     -- of the certificate; NULL: systems trust it
