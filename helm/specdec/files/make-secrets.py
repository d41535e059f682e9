"""Makes the keys of a Secret that are missing: API FOLDER NAMESPACE NAME KEYS.

API is the URL of the API server, FOLDER the service account's. KEYS maps each key to the secret of an older chart from
which it is taken; if there is none, the key is random.
"""

import base64
import json
import secrets
import ssl
import sys
import urllib.error
import urllib.request

api, folder, namespace, name, keys = sys.argv[1:]
path = f"/api/v1/namespaces/{namespace}/secrets"
with open(f"{folder}/token") as file:
    token = file.read()
context = ssl.create_default_context(cafile=f"{folder}/ca.crt") if api.startswith("https") else None


def call(method, path, body=None):
    kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
    headers = {"authorization": f"Bearer {token}", "content-type": kind}
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(api + path, data, headers, method=method)
    with urllib.request.urlopen(request, timeout=10, context=context) as answer:
        return json.load(answer)


def data_of(secret):
    """None: there is no such secret."""
    try:
        return call("GET", f"{path}/{secret}").get("data") or {}
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        return None


try:
    found = data_of(name)
    missing = {key: old for key, old in json.loads(keys).items() if key not in (found or {})}
    for key, old in missing.items():
        random = base64.b64encode(secrets.token_hex(24).encode()).decode()
        missing[key] = (data_of(old) or {}).get(key, random)
    if found is None:
        metadata = {"name": name, "namespace": namespace}
        call("POST", path, {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": missing})
    elif missing:
        call("PATCH", f"{path}/{name}", {"data": missing})
except OSError as error:
    sys.exit(f"secret {name}: {error}")
sys.stdout.write(f"secret {name}: made {', '.join(missing) or 'nothing, all keys exist'}\n")
