import { beforeAll, describe, expect, test } from "vitest";
import { compareWire } from "../../packages/peer/src/wire/compare-wire.js";
import { readWire } from "../../packages/peer/src/wire/read-wire.js";
import { decodeSuite } from "./decode-suite.js";
import { pairSuite } from "./pair-suite.js";
import { prefillSuite } from "./prefill-suite.js";
import { restartSuite } from "./restart-suite.js";
import { sourcesOf, vllmServers } from "./server.js";
import type { PeerKind } from "./tiny-peer.js";
import { unexpectedInputSuite } from "./unexpected-input-suite.js";
import { ONE_LONG_REQUEST, waitingSuite } from "./waiting-suite.js";

/** For a first handshake on a busy machine, and for tests that wait until it expires. */
const LEASE_SECONDS = 15;

/** Two servers, TP 1 and TP 2. Each is P in some suites and D in others. */
export function matrix(kind: PeerKind): void {
  describe(`vLLM ${kind.version}, ${kind.mode}`, () => {
    const servers = vllmServers({
      kind,
      blocks: 600,
      leaseSeconds: LEASE_SECONDS,
      args: ["--enable-prefix-caching", "--max-num-batched-tokens", "128", ...ONE_LONG_REQUEST],
    });
    const one = () => servers.of("tp1");
    const two = () => servers.of("tp2");

    function suite(name: string, sizes: readonly number[], tests: () => void) {
      describe(name, () => {
        beforeAll(async () => {
          await Promise.all(sizes.map((tp) => servers.start(`tp${tp}`, { tp })));
        });
        tests();
      });
    }

    test("kv-peer wire knows all of this release: its messages, and the members of clients' requests", async () => {
      const report = compareWire(await readWire(sourcesOf(kind.version)));
      expect(report).toMatchObject({ differences: [], requestsCompared: true });
    });

    suite("P with TP 2", [2], () => decodeSuite(two));
    suite("P with TP 1", [1], () => decodeSuite(one));
    // Before our engine is P: a worker on the CPU that has paired with one P of another attention
    // backend repacks the blocks from every P.
    suite("TP 1 to TP 2", [1, 2], () => pairSuite(one, two));
    suite("TP 2 to TP 1", [1, 2], () => pairSuite(two, one));
    suite("D with TP 2", [2], () => prefillSuite(two));
    suite("D with TP 1", [1], () => prefillSuite(one));
    suite("requests that wait at D", [1], () => waitingSuite(one));
    suite("vLLM restarts", [1], () => restartSuite(one, () => servers.restart("tp1")));
    suite("unexpected input", [1], () => unexpectedInputSuite(one));
  });
}
