import { readdirSync, readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import fc from "fast-check";
import { describe, expect, test } from "vitest";
import { damaged, endsWell } from "../../test/damaged.js";
import {
  decodeAgentMetadata,
  decodeHandshakePayload,
  decodeHandshakeReply,
  decodeHandshakeRequest,
  decodeNotification,
  decodePushRegistration,
  encodeAgentMetadata,
  encodeHandshakePayload,
  encodeHandshakeReply,
  encodeHandshakeRequest,
  encodeNotification,
  encodePushRegistration,
} from "../index.js";

// The bytes were recorded between vLLM servers; see fixtures/README.md.

const folder = fileURLToPath(new URL("../../fixtures/wire/", import.meta.url));
const bytes = (name: string) => new Uint8Array(readFileSync(folder + name));
const hex = (data: Uint8Array) => Buffer.from(data).toString("hex");
const lines = (name: string) =>
  readFileSync(folder + name, "utf8")
    .split("\n")
    .filter((line) => line !== "")
    .map((line) => JSON.parse(line) as Record<string, unknown>);

const handshakes = readdirSync(`${folder}handshake`)
  .filter((name) => name.endsWith(".req.bin"))
  .map((name) => `handshake/${name.replace(".req.bin", "")}`);

test("there are recorded handshakes of both versions", () => {
  expect(handshakes.length).toBeGreaterThanOrEqual(7);
  expect(handshakes.some((name) => name.includes("v33"))).toBe(true);
});

describe.each(handshakes)("%s", (name) => {
  const told = JSON.parse(readFileSync(`${folder}${name}.json`, "utf8")) as Record<string, unknown>;

  test("the request decodes and encodes to the same bytes", () => {
    const request = decodeHandshakeRequest([bytes(`${name}.req.bin`)]);
    expect(request).toEqual({ ppRank: told["pp_rank"], tpRank: told["tp_rank"] });
    expect(hex(encodeHandshakeRequest(request))).toBe(hex(bytes(`${name}.req.bin`)));
  });

  test("the reply decodes and encodes to the same bytes", () => {
    const frames = [bytes(`${name}.rep0.bin`), bytes(`${name}.rep1.bin`)] as const;
    const reply = decodeHandshakeReply(frames);
    expect(reply.clockSeconds).toBe(told["server_perf_counter"]);
    const again = encodeHandshakeReply(
      encodeHandshakePayload(reply.payload),
      reply.clockSeconds ?? 0,
    );
    expect(again.map(hex)).toEqual(frames.map(hex));
  });

  test("the agent's metadata decodes field by field and encodes to the same bytes", () => {
    const { agentMetadataBytes } = decodeHandshakePayload(bytes(`${name}.rep0.bin`));
    const metadata = decodeAgentMetadata(agentMetadataBytes);
    const wanted = told["agent_metadata"] as Record<string, unknown>;
    expect(metadata).toMatchObject({
      engineId: wanted["engine_id"],
      baseAddresses: wanted["kv_caches_base_addr"],
      blockLengthsBytes: wanted["block_lens"],
      blockStridesBytes: wanted["block_strides"],
      numBlocks: wanted["num_blocks"],
      blockSize: wanted["block_size"],
      attentionBackend: wanted["attn_backend_name"],
    });
    expect(metadata.regionNames).toEqual(wanted["region_names"]);
    expect(metadata.regionMemoryTypes).toEqual(wanted["region_mem_types"]);
    expect(metadata.rest).toEqual({});
    expect(hex(encodeAgentMetadata(metadata))).toBe(hex(agentMetadataBytes));
  });
});

const notificationFiles = readdirSync(folder).filter((name) => name.endsWith(".notifs.jsonl"));

test.each(notificationFiles)(
  "%s: every notification decodes and encodes to the same bytes",
  (name) => {
    const recorded = lines(name);
    expect(recorded.length).toBeGreaterThan(0);
    const kinds: Record<string, string> = {
      HB: "heartbeat",
      DONE: "done",
      PUSH_REG: "push-registration",
    };
    for (const { hex: written, decoded } of recorded as {
      hex: string;
      decoded?: { kind: string };
    }[]) {
      const notification = decodeNotification(Buffer.from(written, "hex"));
      const wanted = kinds[decoded?.kind ?? ""];
      expect(notification.kind).toBe(wanted);
      if (notification.kind === "push-registration") {
        const registration = decodePushRegistration(notification.registration);
        expect(registration.rest).toEqual({});
        expect(encodePushRegistration(registration)).toEqual(notification.registration);
      }
      expect(hex(encodeNotification(notification))).toBe(written);
    }
  },
);

test("decoding arbitrary or damaged bytes returns a value or throws a KvError", () => {
  const decoders: ((data: Uint8Array) => unknown)[] = [
    (data) => decodeHandshakeRequest([data]),
    (data) => decodeHandshakeReply([data, data]),
    decodeAgentMetadata,
    (data) => {
      const notification = decodeNotification(data);
      if (notification.kind === "push-registration")
        decodePushRegistration(notification.registration);
    },
  ];
  const replies = handshakes.map((name) => bytes(`${name}.rep0.bin`));
  const seeds = [
    ...replies,
    ...replies.map((reply) => decodeHandshakePayload(reply).agentMetadataBytes),
    ...handshakes.map((name) => bytes(`${name}.req.bin`)),
    ...notificationFiles.flatMap((name) =>
      lines(name).map((line) => new Uint8Array(Buffer.from(line["hex"] as string, "hex"))),
    ),
  ];
  fc.assert(
    fc.property(fc.oneof(fc.uint8Array({ maxLength: 200 }), damaged(...seeds)), (data) => {
      for (const decode of decoders) endsWell(() => decode(data));
    }),
    { numRuns: 3000 },
  );
});
