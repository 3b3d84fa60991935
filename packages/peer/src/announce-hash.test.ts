import { systemRandom } from "@kv/interface";
import { decodeHandshakePayload, encodeHandshakePayload } from "@kv/protocol";
import { expect, test } from "vitest";
import { announceHash } from "./announce-hash.js";
import { connectorFor, decodeIdOf } from "./connector-for.js";

const metadata = {
  ppRank: 0,
  tpRank: 1,
  payload: encodeHandshakePayload({
    compatibilityHash: "ab".repeat(32),
    agentMetadataBytes: Uint8Array.of(1, 2, 3),
    extension: { version: 1, features: ["push-control-1"] },
    rest: {},
  }),
};
const HASH = "cd".repeat(32);

test("another hash goes out; what only our engines say goes with it or not; the agent's bytes stay", () => {
  const announced = [true, false].map((own) => announceHash(metadata, HASH, { own }));
  const [ours, bare] = announced.map(({ payload }) => decodeHandshakePayload(payload));
  expect(ours).toMatchObject({ compatibilityHash: HASH, extension: { features: ["push-control-1"] } });
  expect(bare?.compatibilityHash).toBe(HASH);
  expect(bare?.extension).toBeUndefined();
  expect(bare?.agentMetadataBytes).toEqual(Uint8Array.of(1, 2, 3));
  expect(announced[0]).toMatchObject({ ppRank: 0, tpRank: 1 });
});

test("a server that pushes gets the connector that is pushed to, and an id that it finds its own by", () => {
  expect(connectorFor({ transferMode: "push" }).name).toBe("NixlPushConnector");
  expect(connectorFor({ transferMode: "pull" }).name).toBe("NixlPullConnector");
  const id = decodeIdOf({ remoteRequestId: "cmpl-x-0-1a2b3c4d" }, systemRandom());
  expect(id).toMatch(/^cmpl-x-0-[0-9a-f]{8}$/);
  expect(id).not.toBe("cmpl-x-0-1a2b3c4d");
});
