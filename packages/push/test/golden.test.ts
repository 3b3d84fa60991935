import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { readTransferConfig } from "@kv/connector";
import type { LeaseOrder } from "@kv/connector/building-blocks";
import { descriptorPairs, type Transfer, type TransferRequest } from "@kv/interface";
import type { RankGeometry } from "@kv/plan";
import {
  decodeRegistration,
  encodeNotification,
  encodeRegistration,
  type Registration,
} from "@kv/protocol";
import { engineIdentity } from "@kv/testing/engine-identity";
import { manualClock } from "@kv/testing/manual-clock";
import { listAgent, testContext, testRanks } from "@kv/testing/worker-context";
import { memoryNetwork, memorySideChannel } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";
import { PrefillScheduler } from "../../connector/src/scheduler/prefill-scheduler.js";
import { consumerEngines } from "../src/prefill/consumer-engine.js";
import { writeBlocks } from "../src/prefill/write-blocks.js";
import { createPushScheduler } from "../src/scheduler.js";
import type { PushStepMetadata } from "../src/step-metadata.js";

// Recordings of vLLM servers (0.32 and 0.33). Their source: packages/protocol/fixtures/README.md.
const folder = fileURLToPath(new URL("../../protocol/fixtures/wire/", import.meta.url));

/** The keys of a recorded line that the tests read. Each kind of line has some of them. */
interface Line {
  readonly hex: string;
  readonly decoded: {
    readonly kind: string;
    readonly msgpack: RecordedRegistration;
    readonly req_ids: string[];
  };
  readonly ev?: string;
  readonly req: string;
  readonly ret: readonly [number, boolean];
  readonly delay_free: boolean;
  readonly params: Params | null;
  readonly op?: string;
  readonly local_idx: readonly number[];
  readonly remote_idx: readonly number[];
  readonly notif: string;
}

interface RecordedRegistration {
  readonly request_id: string;
  readonly decode_engine_id: string;
  readonly decode_host: string;
  readonly decode_port: number;
  readonly decode_tp_size: number;
  readonly local_block_ids: readonly (readonly number[])[];
  readonly remote_engine_id: string;
  readonly remote_host: string;
  readonly remote_port: number;
  readonly remote_tp_size: number;
  readonly remote_pp_size: number;
}

interface Params {
  readonly remote_block_ids: readonly (readonly number[])[];
  readonly remote_engine_id: string;
  readonly remote_request_id: string;
  readonly remote_host: string;
  readonly remote_port: number;
  readonly tp_size: number;
  readonly remote_num_tokens: number;
}

const lines = (name: string): Line[] =>
  readFileSync(`${folder}${name}.jsonl`, "utf8")
    .split("\n")
    .filter((line) => line !== "")
    .map((line) => JSON.parse(line) as Line);

const RECORDINGS = ["push_p1d1", "v33_push_p1d2"];
const LAYERS = ["0", "1", "2", "3"];
const CACHE = {
  groups: [{ kind: "full" as const, layerNames: LAYERS }],
  blockSize: 32,
  physicalBlocksPerLogical: 1,
  numKvHeads: 4,
  headSize: 32,
  numHiddenLayers: 4,
  dtype: "torch.float32",
  cacheDtype: "auto",
  layout: "LBHNC" as const,
  attentionBackend: "CPU_ATTN",
};

describe.each(RECORDINGS)("as recorded from vLLM in %s", (recording) => {
  const registrations = lines(`${recording}.notifs`).filter(
    ({ decoded }) => decoded.kind === "PUSH_REG",
  );
  const scheduled = lines(`${recording}.sched`);

  it("a registration is encoded and decoded byte for byte", () => {
    expect(registrations.length).toBeGreaterThan(3);
    for (const { hex, decoded } of registrations) {
      const recorded = decoded.msgpack;
      const order = {
        requestId: "not on the wire",
        wireId: recorded.request_id,
        generation: 7,
        oldestOpen: 7,
        remote: {
          engineId: recorded.remote_engine_id,
          host: recorded.remote_host,
          port: recorded.remote_port,
          tpSize: recorded.remote_tp_size,
          dcpSize: 1,
          ppSize: recorded.remote_pp_size,
          registrationGeneration: 0,
          requestId: "not on the wire",
        },
        secret: "s".repeat(22),
        localBlockIds: recorded.local_block_ids,
        localComputedBlocks: [0],
        numTokens: 1,
        isAwaited: true,
        host: recorded.decode_host,
        port: recorded.decode_port,
      };
      const registrant = {
        engineId: recorded.decode_engine_id,
        tpSize: recorded.decode_tp_size,
        tpRank: 0,
        incarnation: "i",
      };
      expect(Buffer.from(encodeRegistration(order, registrant, false)).toString("hex")).toBe(hex);
      expect(decodeRegistration({ ...recorded })).toEqual({
        wireId: order.wireId,
        matchId: order.wireId,
        engineId: registrant.engineId,
        host: order.host,
        port: order.port,
        tpSize: registrant.tpSize,
        blockIds: order.localBlockIds,
        producerEngineId: order.remote.engineId,
      });
    }
  });

  it("a prefill scheduler answers with the same parameters in the same order", () => {
    for (const ended of scheduled.filter(({ ev }) => ev === "sched.request_finished.ret")) {
      const { params } = ended;
      if (params === null) continue;
      const prefill = new PrefillScheduler({
        transferMode: "push",
        clock: manualClock(),
        config: CACHE,
        engineId: params.remote_engine_id,
        tpSize: params.tp_size,
        dcpSize: 1,
        ppSize: 1,
        leaseMs: 30_000,
        decoderBlocksTtlMs: 480_000,
        incarnation: "i",
        address: () => ({
          host: params.remote_host,
          port: params.remote_port,
          registrationGeneration: 3,
        }),
      });
      const request = {
        requestId: params.remote_request_id,
        numPromptTokens: params.remote_num_tokens,
        kvTransferParams: { do_remote_decode: true },
      };
      const answer = prefill.finished(request, params.remote_block_ids, "length");
      expect(answer.keepBlocks).toBe(ended.delay_free);
      const { kv_peer: _, ...ours } = answer.kvTransferParams ?? {};
      expect(JSON.stringify(ours)).toBe(JSON.stringify(params));
    }
  });

  it("a decode scheduler requests the same tokens and registers the same blocks", async () => {
    const matched = scheduled.filter(
      ({ ev, ret }) => ev === "sched.get_num_new_matched_tokens" && ret[1],
    );
    expect(matched.length).toBeGreaterThan(0);
    for (const { req, params, ret } of matched) {
      if (params === null) continue;
      const registered = registrations.find(({ decoded }) => decoded.msgpack.request_id === req)
        ?.decoded.msgpack;
      if (registered === undefined) throw new Error(`${req} is not registered in the recording`);
      const network = memoryNetwork();
      const decode = createPushScheduler({
        clock: manualClock(),
        config: {
          ...readTransferConfig({ kv_connector: "NixlPushConnector", kv_role: "kv_both" }),
          sideChannelHost: registered.decode_host,
          sideChannelPort: registered.decode_port,
        },
        engine: engineIdentity("d"),
        cache: CACHE,
        sideChannel: memorySideChannel({ network, host: registered.decode_host }),
      });
      await decode.setHandshakeMetadata([]);
      const takeStep = () => decode.buildStepMetadata() as PushStepMetadata;
      const request = { requestId: req, numPromptTokens: ret[0], kvTransferParams: { ...params } };
      decode.requestQueued(request);
      expect(takeStep().heartbeats).toMatchObject([
        { begin: [{ requestId: params.remote_request_id }] },
      ]);
      expect(decode.matchedTokens(request, 0)).toEqual({ tokens: ret[0], async: true });
      decode.afterAllocation(request, registered.local_block_ids, ret[0]);
      expect(takeStep().registrations).toMatchObject([
        {
          requestId: req,
          wireId: req,
          localBlockIds: registered.local_block_ids,
          remote: {
            engineId: registered.remote_engine_id,
            host: registered.remote_host,
            port: registered.remote_port,
            tpSize: registered.remote_tp_size,
          },
        },
      ]);
    }
  });

  it("the same descriptors are written, with the same notification", async () => {
    const writes = lines(`${recording}.xfers`).filter(({ op }) => op === "WRITE");
    const decodeTpSize = recording.endsWith("d2") ? 2 : 1;
    const rank = (tpRank: number, tpSize: number, numBlocks: number): RankGeometry => ({
      tpRank,
      tpSize,
      kernelBlockSize: 32,
      physicalBlocksPerLogical: 1,
      layout: "LBHNC",
      attentionBackend: "CPU_ATTN",
      deviceId: 0,
      regions: LAYERS.map((name, i): RankGeometry["regions"][number] => ({
        name,
        baseAddress: 2 ** 40 + i * 2 ** 24,
        numBlocks,
        blockLengthBytes: (4 / tpSize) * 32 * 64 * 4,
        blockStrideBytes: (4 / tpSize) * 32 * 64 * 4,
        groupId: 0,
        memoryType: "DRAM",
      })),
    });
    const done: TransferRequest[] = [];
    const agent = listAgent({
      transfer(request: TransferRequest) {
        done.push(request);
        return { done: Promise.resolve({}), released: Promise.resolve() } as unknown as Transfer;
      },
    });
    const context = testContext({
      agent,
      local: rank(0, 1, 64),
      remote: testRanks((tpRank) => rank(tpRank, decodeTpSize, 48)),
    });
    const address = {
      engineId: "d",
      host: "d",
      port: 1,
      tpSize: decodeTpSize,
      dcpSize: 1,
      ppSize: 1,
    };
    const { engine: consumer } = await consumerEngines(context).open(address);
    for (let at = 0; at < writes.length; at += decodeTpSize) {
      const first = writes[at];
      if (first === undefined) continue;
      const perRegion = first.local_idx.length / 4;
      const promptBlockIds = [first.local_idx.slice(0, perRegion)];
      const order = {
        requestId: "p",
        promptBlockIds,
        numTokens: perRegion * 32 - 20,
      } as unknown as LeaseOrder;
      const registration = {
        wireId: first.notif.slice(0, -2),
        blockIds: [first.remote_idx.slice(0, perRegion)],
      } as unknown as Registration;
      done.splice(0);
      const write = { registration, ranks: [...consumer.targets.keys()], order };
      await writeBlocks(consumer, write, new AbortController().signal, context);
      expect(done.length).toBe(decodeTpSize);
      for (const [index, request] of done.entries()) {
        const theirs = writes[at + index] as Line;
        const pairs = (local: ArrayLike<number>, remote: ArrayLike<number>) =>
          Array.from(local, (id, i) => `${id} → ${remote[i]}`).sort();
        expect(request.operation).toBe("WRITE");
        const { localIds, remoteIds } = descriptorPairs(request);
        expect(pairs(localIds, remoteIds)).toEqual(pairs(theirs.local_idx, theirs.remote_idx));
        expect(new TextDecoder().decode(request.notification)).toBe(theirs.notif);
      }
    }
  });
});

it("a heartbeat is encoded byte for byte", () => {
  const heartbeats = lines("v33_push_p1d2.notifs").filter(({ decoded }) => decoded.kind === "HB");
  expect(heartbeats.length).toBeGreaterThan(0);
  for (const { hex, decoded } of heartbeats) {
    const requestIds = decoded.req_ids;
    expect(Buffer.from(encodeNotification({ kind: "heartbeat", requestIds })).toString("hex")).toBe(
      hex,
    );
  }
});
