// Loads NIXL with UCX and, where it has that plugin, OBJ: all that links OpenSSL.
import { nixlTransport } from "@kv/nixl";

const parameters = { bucket: "kv", region: "us-east-1", access_key: "any", secret_key: "any" };
const backends = ["UCX", ...(process.argv[2] === "OBJ" ? [{ name: "OBJ", parameters }] : [])];
await using transport = nixlTransport({ backends });
await transport.createAgent();
process.stdout.write("loaded");
