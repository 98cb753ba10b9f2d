"""moto's server, one request after another: its own create-if-absent lets several through that come at once. Bodies that are
not those that were signed are refused, as S3 does.

With ``gcs`` it speaks the XML side of Google Cloud Storage, which is S3 in other words: the condition of a create, the
signature, numbers of versions, and that the deletion of what is absent is an error. Run as a script: PORT [gcs].
"""

from __future__ import annotations

import hashlib
import io
import sys
import threading

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple


def main(port: int, dialect: str = "s3") -> None:
    """Serves until it is ended."""
    app, turn = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def one_by_one(environ, start_response):
        # Read before the turn: a client that is slow to send holds nobody up.
        length = int(environ.get("CONTENT_LENGTH") or 0)
        if length:
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length))
        if is_spoilt(environ):
            start_response("400 BAD REQUEST", [("Content-Type", "application/xml")])
            return [b"<Error><Code>XAmzContentSHA256Mismatch</Code></Error>"]
        with turn:
            if dialect == "gcs":
                return translated(app, environ, start_response)
            return [*app(environ, start_response)]

    run_simple("127.0.0.1", port, one_by_one, threaded=True, request_handler=MotoRequestHandler)


def is_spoilt(environ):
    """Whether the body is not the one that was signed, which moto does not look at."""
    signed = environ.get("HTTP_X_AMZ_CONTENT_SHA256", "")
    if len(signed) != 64 or not isinstance(environ["wsgi.input"], io.BytesIO):
        return False
    return hashlib.sha256(environ["wsgi.input"].getbuffer()).hexdigest() != signed


def translated(app, environ, start_response):
    """One request of Google's dialect."""
    # Told by its host and its signature otherwise.
    scope = "Credential=key/20260101/us-east-1/s3/aws4_request"
    environ["HTTP_AUTHORIZATION"] = f"AWS4-HMAC-SHA256 {scope}, SignedHeaders=host, Signature=none"
    wanted = environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None)
    if wanted == "0":
        environ["HTTP_IF_NONE_MATCH"] = "*"
    elif wanted is not None:
        found = []
        about = {"REQUEST_METHOD": "HEAD", "CONTENT_LENGTH": "0", "wsgi.input": io.BytesIO()}
        [*app(environ | about, lambda status, headers, error=None: found.extend(generation_of(headers)))]
        if [value for _, value in found] != [wanted]:
            start_response("412 PRECONDITION FAILED", [("Content-Type", "application/xml")])
            return [b"<Error><Code>PreconditionFailed</Code></Error>"]
    if environ["REQUEST_METHOD"] == "DELETE" and not environ["QUERY_STRING"]:
        said = []
        [*app(environ | {"REQUEST_METHOD": "HEAD"}, lambda status, headers, error=None: said.append(status))]
        if said[0].startswith("404"):
            start_response("404 NOT FOUND", [("Content-Length", "0")])
            return [b""]

    def numbered(status, headers, error=None):
        return start_response(status, [*headers, *generation_of(headers)], error)

    return [*app(environ, numbered)]


def generation_of(headers):
    """The header with the number of this version of an object, where there is one."""
    tags = [value for name, value in headers if name.lower() == "etag"]
    return [("x-goog-generation", str(int(tag.strip('"')[:15], 16))) for tag in tags]


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
