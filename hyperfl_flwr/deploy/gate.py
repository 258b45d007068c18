"""The configuration of nginx in front of a SuperLink: who gets through, and how much of nginx one client can take.

Flower checks a node's signature when it has read the whole body of a request. nginx checks beforehand that the request
names a public key of this deployment, which only the node and the operator have, so that others cannot hold a
connection by a body that never ends. Before a request's header has been read nginx cannot count the connections of an
address; they are limited by time instead.
"""

import base64

from cryptography.hazmat.primitives import serialization

from hyperfl_flwr.deploy.keys import read_public_key
from hyperfl_flwr.deploy.layout import Deployment
from hyperfl_flwr.deploy.templates import fill

_GATE = """\
# nginx between the nodes and the SuperLink: it lets them at what nodes need, and nobody but this machine at the rest,
# which takes runs, that is programs, from everybody who reaches it. In `environment`: HYPERFL_BIND=127.0.0.1
# Then start both: sh start.sh, and in this folder: nginx -p . -c nginx.conf
# `listen` must name the address of this machine's network interface, and not 0.0.0.0: the SuperLink has the same port
# of 127.0.0.1.
daemon off;
pid nginx.pid;
error_log stderr;
# A request takes two connections, the client's and the SuperLink's, and each a file.
worker_rlimit_nofile 10000;
events { worker_connections 8192; }
http {
    access_log off;
    client_body_temp_path nginx-temporary;
    proxy_temp_path nginx-temporary-answers;
    fastcgi_temp_path nginx-unused-1;
    uwsgi_temp_path nginx-unused-2;
    scgi_temp_path nginx-unused-3;

    # The nodes' public keys as Flower sends them; the SuperLink checks the signatures.
    map_hash_bucket_size 512;
    map_hash_max_size 16384;
    map $http_flwr_public_key $node {
        default "";
@KEYS@
    }
    limit_conn_zone $node zone=nodes:1m;
    limit_req_zone $binary_remote_addr zone=addresses:10m rate=10r/s;
    # Refusals are not logged, or whoever is refused could fill the disk.
    limit_conn_log_level info;
    limit_req_log_level info;

    # For the TLS handshake, and for a request's whole header.
    client_header_timeout 15s;
    # Between two reads or writes, however long the whole takes: large messages pass slow links.
    client_body_timeout 30s;
    send_timeout 30s;
    proxy_read_timeout 300s;
    # Between two requests; a SuperNode drops a connection after 5 s without one.
    keepalive_timeout 15s;
    # For the rest of a request that was refused.
    lingering_time 5s;

    server {
        listen @HOST@:@PORT@ ssl;
        ssl_certificate server.crt;
        ssl_certificate_key server.key;
        ssl_protocols TLSv1.2 TLSv1.3;
        # Before the size of its body is looked at and logged.
        if ($node = "") { rewrite ^/v1/fleet/ /refused; }
        # With its path proxy_pass hands on what was compared, and not /v1/control/?/../../fleet/ as it was sent.
        location /v1/fleet/ {
            limit_conn nodes 16;
            # Flower sends arrays in pieces of 5 MiB, each in a request of its own.
            client_max_body_size 8m;
            proxy_pass https://127.0.0.1:@PORT@/v1/fleet/;
        }
        # The list of a reply's arrays and their pieces, 70 bytes each: while the SuperLink stores thousands of them,
        # its database is locked for all others.
        location = /v1/fleet/push-messages {
            limit_conn nodes 16;
            client_max_body_size 128k;
            proxy_pass https://127.0.0.1:@PORT@/v1/fleet/push-messages;
        }
        location = /health {
            if ($http_content_length ~ "[1-9]") { return 403; }
            if ($http_transfer_encoding) { return 403; }
            limit_req zone=addresses burst=100 nodelay;
            proxy_pass https://127.0.0.1:@PORT@;
        }
        location / { return 403; }
        client_max_body_size 0;
        proxy_http_version 1.1;
        # Nothing is put into a file on the way: if root starts nginx, its workers may not write here.
        proxy_request_buffering off;
        proxy_buffering off;
        proxy_ssl_verify on;
        proxy_ssl_name localhost;
        proxy_ssl_trusted_certificate ca.crt;
    }
}
"""


def gate(deployment: Deployment) -> str:
    """Return the text of `nginx.conf`, for a deployment that has its nodes' public keys."""
    keys = [f'        "{sent_key(deployment, number)}" {number};' for number in range(deployment.num_nodes)]
    return fill(_GATE, host=deployment.host, port=deployment.port, keys="\n".join(keys))


def sent_key(deployment: Deployment, number: int) -> str:
    """Return a node's public key as Flower puts it into the header of each request."""
    key = read_public_key(deployment.public_key(number))
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return base64.b64encode(pem).decode()
