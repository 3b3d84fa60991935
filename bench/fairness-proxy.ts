// A kv-proxy whose prefill instances publish KV events at the endpoints of argv: `PREFILL DECODE ENDPOINT`. Prints its URL.
import { createProxy } from "@kv/proxy";

const [prefill = "", decode = "", kvEvents = ""] = process.argv.slice(2);
const proxy = createProxy({
  prefillers: [{ url: prefill }, { url: prefill.replace("127.0.0.1", "localhost"), kvEvents }],
  decoders: [decode],
  routing: { prefill: "prefix-aware", decode: "round-robin" },
  pairing: { mode: "off" },
  // The load of one address is what is measured.
  limits: { requestsPerClient: 10_000, bodiesPerClientLengthBytes: 2 ** 27 },
});
const { url } = await proxy.listen({ port: 0 });
process.stdout.write(`${url}\n`);

process.stdin.on("end", () => process.exit(0)).resume();
