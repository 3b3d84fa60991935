import { systemRandom } from "@kv/interface";
import { decodeHandshakePayload, encodeHandshakePayload } from "@kv/protocol";
import { expect, test } from "vitest";
import { connectorFor, decodeRequestId, replaceCompatibilityHash } from "./remote-engine.js";

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

test("replaceCompatibilityHash changes the hash, keeps the agent's bytes, and keeps the extension only when asked", () => {
  const replaced = [true, false].map((keepExtension) =>
    replaceCompatibilityHash(metadata, HASH, { keepExtension }),
  );
  const [extended, plain] = replaced.map(({ payload }) => decodeHandshakePayload(payload));
  expect(extended).toMatchObject({
    compatibilityHash: HASH,
    extension: { features: ["push-control-1"] },
  });
  expect(plain?.compatibilityHash).toBe(HASH);
  expect(plain?.extension).toBeUndefined();
  expect(plain?.agentMetadataBytes).toEqual(Uint8Array.of(1, 2, 3));
  expect(replaced[0]).toMatchObject({ ppRank: 0, tpRank: 1 });
});

test("a push server pairs with the push connector, and the decode id shares the base of the remote id", () => {
  expect(connectorFor({ transferMode: "push" }).name).toBe("NixlPushConnector");
  expect(connectorFor({ transferMode: "pull" }).name).toBe("NixlPullConnector");
  const id = decodeRequestId({ remoteRequestId: "cmpl-x-0-1a2b3c4d" }, systemRandom());
  expect(id).toMatch(/^cmpl-x-0-[0-9a-f]{8}$/);
  expect(id).not.toBe("cmpl-x-0-1a2b3c4d");
});
