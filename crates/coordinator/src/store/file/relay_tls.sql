-- Version 6: TLS ports of seikan's own relays.
ALTER TABLE relay ADD COLUMN tls_port INTEGER; -- TCP; NULL: no TLS
ALTER TABLE relay ADD COLUMN tls_pin TEXT;     -- of the certificate; NULL: signed by a public CA
