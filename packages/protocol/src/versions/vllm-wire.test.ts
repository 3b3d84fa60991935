import { readFileSync } from "node:fs";
import { expect, test } from "vitest";
import {
  compatibilityHash,
  decodeAgentMetadata,
  decodeHandshakePayload,
  decodeHandshakeReply,
  decodeHandshakeRequest,
  decodeMsgpack,
  describedVersion,
  encodeAgentMetadata,
  encodeMsgpack,
  encodePushRegistration,
  encodeRemotePrefillParams,
  NEWEST_VLLM_VERSION,
  VLLM_VERSIONS,
  vllmWire,
} from "../index.js";

const fixtures = new URL("../../fixtures/wire/", import.meta.url);
const frame = readFileSync(new URL("handshake/v33_pull_p1.pp0tp0.rep0.bin", fixtures));
const sent = decodeHandshakePayload(frame).agentMetadataBytes;
const newest = vllmWire(NEWEST_VLLM_VERSION);
const namesIn = (section: keyof typeof newest, wire = newest) =>
  Object.keys(wire[section]).filter((name) => name !== "class");

test("the codecs write the fields that the newest version is described with, in the same order", () => {
  const written = decodeMsgpack(encodeAgentMetadata(decodeAgentMetadata(sent)), "metadata");
  expect(Object.keys(written as object)).toEqual(namesIn("agent metadata"));

  const side = { engineId: "e", host: "h", port: 1 };
  const registration = encodePushRegistration({
    requestId: "r",
    decodeEngineId: side.engineId,
    decodeHost: side.host,
    decodePort: side.port,
    decodeTpSize: 1,
    localBlockIds: [[1]],
    remoteEngineId: side.engineId,
    remoteHost: side.host,
    remotePort: side.port,
    remoteTpSize: 1,
    remotePpSize: 1,
    rest: {},
  });
  expect(Object.keys(registration)).toEqual(namesIn("push registration"));

  const answer = {
    remoteBlockIds: [[1]],
    remoteEngineId: side.engineId,
    remoteRequestId: "r",
    remoteHost: side.host,
    remotePort: side.port,
    tpSize: 1,
    dcpSize: 1,
    ppSize: 1,
    remoteNumTokens: 1,
  };
  const pull = {
    ...answer,
    remoteBlocksExpiryTime: null,
    remoteRegistrationGeneration: 1,
    transferMode: "pull",
  };
  expect(Object.keys(encodeRemotePrefillParams(pull))).toEqual(namesIn("pull answer"));
  // D's answer, which P reads back: the same dictionary in vLLM's source, with two flags exchanged.
  expect(Object.keys(encodeRemotePrefillParams({ ...pull, isDecoded: true }))).toEqual(
    namesIn("pull answer"),
  );
  expect(Object.keys(encodeRemotePrefillParams({ ...answer, transferMode: "push" }))).toEqual(
    namesIn("push answer"),
  );
});

test("the recorded hash factors are those that the newest version is described with", () => {
  const lines = readFileSync(new URL("compat_hash.jsonl", fixtures), "utf8").trim().split("\n");
  const recorded = lines.map((line) => JSON.parse(line).factors as Record<string, unknown>);
  const factors =
    recorded.find(({ vllm_version }) => vllm_version === NEWEST_VLLM_VERSION.version) ?? {};
  const described = namesIn("compatibility hash").filter((name) => !name.includes("."));
  expect(Object.keys(factors).sort()).toEqual(described.sort());
});

test.each(VLLM_VERSIONS)(
  "metadata with the fields of vLLM $version is decoded, and no field is unknown",
  (version) => {
    const fields = decodeMsgpack(sent, "metadata") as Record<string, unknown>;
    const names = namesIn("agent metadata", vllmWire(version));
    const metadata = decodeAgentMetadata(
      encodeMsgpack(Object.fromEntries(names.map((name) => [name, fields[name]]))),
    );
    expect(metadata.rest).toEqual({});
    expect(metadata.blockStridesBytes).toEqual(fields["block_lens"]);
  },
);

test("an entry is described from the release that added it up to the one that removed it", () => {
  const has = (release: string, section: keyof typeof newest, name: string) => {
    const version = describedVersion(release);
    return version !== undefined && name in vllmWire(version)[section];
  };
  expect(["0.31.0", "0.32.0"].map((each) => has(each, "agent metadata", "ple_block_len"))).toEqual([
    false,
    true,
  ]);
  expect(
    ["0.28.0", "0.29.0"].map((each) => has(each, "compatibility hash", "cross_layers_blocks")),
  ).toEqual([true, false]);
});

test.each([
  ["0.33.0", "0.33.0"],
  ["0.33.1+cpu", "0.33.0"],
  ["0.27", "0.27.1"],
  ["0.34.0.dev3", undefined],
  ["0.3", undefined],
  ["0.330.0", undefined],
  ["x", undefined],
])("version %s is described as %s", (version, described) => {
  expect(describedVersion(version)?.version).toBe(described);
});

const OLDER = VLLM_VERSIONS.filter(({ connectorVersion }) => connectorVersion < 14);

test.each(OLDER)(
  "the handshake that the Python code of vLLM $version made is as described, and is decoded",
  (version) => {
    const read = (name: string) =>
      new Uint8Array(readFileSync(new URL(`versions/${version.version}.${name}`, fixtures)));
    const origin = JSON.parse(new TextDecoder().decode(read("json")));
    expect(decodeHandshakeRequest([read("req.bin")])).toEqual({ ppRank: 0, tpRank: 0 });
    const { payload, clockSeconds } = decodeHandshakeReply([read("rep0.bin"), read("rep1.bin")]);
    expect(clockSeconds).toBeGreaterThan(0);
    expect(payload.rest).toEqual({});
    expect(payload.compatibilityHash).toBe(compatibilityHash(origin.factors));
    const described = namesIn("compatibility hash", vllmWire(version)).filter(
      (name) => !name.includes("."),
    );
    expect(Object.keys(origin.factors)).toEqual(described);
    expect(origin.factors).toMatchObject({
      vllm_version: version.version,
      nixl_connector_version: version.connectorVersion,
    });

    const fields = decodeMsgpack(payload.agentMetadataBytes, "metadata") as object;
    expect(Object.keys(fields)).toEqual(namesIn("agent metadata", vllmWire(version)));
    const metadata = decodeAgentMetadata(payload.agentMetadataBytes);
    expect(metadata).toMatchObject({
      kvCacheLayout: "LBHNC",
      blockStridesBytes: [32768, 32768, 32768, 32768],
      rest: {},
    });
    expect(metadata.baseAddresses).toEqual(origin.agent_metadata.kv_caches_base_addr);
  },
);
