// Loads NIXL with UCX and, where it has that plugin, OBJ: all that links OpenSSL.
import { nixlTransport } from "@kv/nixl";
import { objectBackend } from "@kv/testing/nixl/object-store";

const backends = ["UCX", ...(process.argv[2] === "OBJ" ? [objectBackend(1)] : [])];
await using transport = nixlTransport({ backends });
await transport.createAgent();
process.stdout.write("loaded");
