// A kv-proxy of two P and two D, of which the second P publishes KV events: argv is
// `PREFILL DECODE PREFILL DECODE ENDPOINT`. Prints its URL.
import { createProxy } from "@kv/proxy";

const [prefill = "", decode = "", other = "", otherDecode = "", kvEvents = ""] =
  process.argv.slice(2);
const proxy = createProxy({
  prefillers: [{ url: prefill }, { url: other, kvEvents }],
  decoders: [decode, otherDecode],
  routing: { prefill: "prefix-aware", decode: "round-robin" },
  pairing: { mode: "off" },
  // The load of one address is what is measured.
  limits: { requestsPerClient: 10_000, bodiesPerClientLengthBytes: 2 ** 27 },
});
const { url } = await proxy.listen({ port: 0 });
process.stdout.write(`${url}\n`);

process.stdin.on("end", () => process.exit(0)).resume();
