import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { KvTransferParams } from "@kv/interface";
import {
  decodeHandshakeReply,
  decodeLeaseReply,
  decodeNotification,
  encodeHandshakeRequest,
  encodeLeaseQuery,
  newCapability,
} from "@kv/protocol";
import { pullConnector } from "@kv/pull";
import { pushConnector } from "@kv/push";
import { zmqSideChannel } from "@kv/side-channel";
import {
  FORGED_FOR_DECODE,
  FORGED_FOR_PREFILL,
  FORGED_PARAMS,
  type Known,
} from "@kv/testing/isolation/attacks";
import { injectableTransport } from "@kv/testing/isolation/injectable-transport";
import { createSimEngine, outcomeOf } from "@kv/testing/simulator/sim-engine";
import type { SimEngineOptions } from "@kv/testing/simulator/sim-options";
import { memoryNetwork } from "@kv/transport-memory";
import { type Row, rowOf } from "../row.js";

const ROUNDS = 150;
const QUESTIONS = 10;
const NUM_TOKENS = 80;
const MAX_GROWTH_MIB = 512;
const CONNECTORS = { pull: pullConnector, push: pushConnector };

/** A P, a D and a listener of an attacker under P's name. */
async function startEngines(connector: keyof typeof CONNECTORS, extra: Record<string, unknown>) {
  const network = memoryNetwork();
  const violations: string[] = [];
  const atPrefill = injectableTransport();
  let incarnation = "";
  const atDecode = injectableTransport(undefined, (payload) => {
    const sent = decodeNotification(payload);
    if (sent.kind !== "push-registration") return;
    incarnation = String((sent.registration.kv_peer as { incarnation?: unknown })?.incarnation);
  });
  const start = (hostName: string, engineId: string, more: Partial<SimEngineOptions>) =>
    createSimEngine({
      network,
      hostName,
      engineId,
      tpSize: 1,
      blockSize: 16,
      numBlocks: 512,
      connector: CONNECTORS[connector],
      sideChannel: zmqSideChannel(),
      violation: (what) => void violations.push(what),
      ...more,
    });
  const p = await start("p", "p", { extra, wrapTransport: atPrefill.wrap });
  const d = await start("d", "d", { extra, wrapTransport: atDecode.wrap });
  const rogue = await start("rogue", "p", { plain: true });
  await rogue.prefill({ requestId: "garbage", prompt: 999_983, numTokens: 8000 });

  const known = (
    victim: KvTransferParams,
    own: KvTransferParams,
    more: Partial<Known> = {},
  ): Known => ({
    victim,
    own,
    rogue: rogue.address,
    decodeRequestId: "",
    decode: { ...d.address, incarnation, tpSize: 1 },
    ...more,
  });

  return {
    port: p.address.port,
    violations,
    known,
    prefill: (requestId: string, prompt: number) =>
      p.prefill({ requestId, prompt, numTokens: NUM_TOKENS }),
    decode: (requestId: string, prompt: number, params: KvTransferParams) =>
      outcomeOf(d.decode({ requestId, prompt, numTokens: NUM_TOKENS, params })),
    /** Returns the number of forged notifications. */
    forge(forged: Known): number {
      const forPrefill = Object.values(FORGED_FOR_PREFILL);
      const forDecode = Object.values(FORGED_FOR_DECODE);
      for (const make of forPrefill) atPrefill.inject(make(forged));
      for (const make of forDecode) atDecode.inject(make(forged));
      return forPrefill.length + forDecode.length;
    },
  };
}

const rssMib = () => Math.round(process.memoryUsage.rss() / 2 ** 20);

export async function forgedParams(): Promise<Row> {
  const engines = await startEngines("pull", { require_kv_peer: true });
  const before = rssMib();
  // A forged registration waits for a handshake: the rounds do not wait for the forgeries.
  const forged: Promise<string>[] = [];
  let wrongUsers = 0;
  for (let round = 0; round < ROUNDS; round += 1) {
    const victim = await engines.prefill(`v${round}`, round);
    const own = await engines.prefill(`own${round}`, 100_000 + round);
    const known = engines.known(victim, own, { laterGeneration: 1000 + round });
    const forgeries: KvTransferParams[] = [
      ...Object.values(FORGED_PARAMS).map((make) => make(known)),
      { ...own, remote_block_ids: [[1, 1, 2, 3, 4]] },
    ];
    const many = { length: 3_000_000 };
    if (round % 30 === 0)
      forgeries.push({ ...own, remote_block_ids: [Array.from(many, (_, id) => id)] });
    for (const [index, params] of forgeries.entries())
      forged.push(engines.decode(`x${round}-${index}`, 100_000 + round, params));
    if ((await engines.decode(`d${round}`, round, victim)) !== "ok") wrongUsers += 1;
  }

  const accepted = (await Promise.all(forged)).filter((outcome) => outcome === "ok").length;
  const grownMib = rssMib() - before;
  const tries = `${forged.length} forged requests beside ${ROUNDS} of users`;
  return rowOf("kv_transfer_params that a client of D has written", tries, [
    [`${accepted} accepted`, accepted === 0],
    [`${wrongUsers} users failed`, wrongUsers === 0],
    [`${engines.violations.length} with wrong bytes`, engines.violations.length === 0],
    [`+${grownMib} MiB`, grownMib < MAX_GROWTH_MIB],
  ]);
}

/** Returns what a stranger's handshake and lease question tell about a user's request. */
async function learned(port: number, requestId: string): Promise<number> {
  const stranger = zmqSideChannel();
  const capability = newCapability();
  const query = { engineId: "p", requestId, generation: 1, capability, blocks: undefined };
  const learns = async (question: Uint8Array, read: (frames: readonly Uint8Array[]) => unknown) => {
    const asked = { host: "127.0.0.1", port, frames: [question], timeoutMs: 2000 };
    const answer = await stranger.request(asked).catch(() => undefined);
    try {
      return answer !== undefined && read(answer.frames) !== undefined ? 1 : 0;
    } catch {
      return 0; // A refusal.
    }
  };

  const handshake = encodeHandshakeRequest({ ppRank: 0, tpRank: 0 });
  let sum = 0;
  for (let question = 0; question < QUESTIONS; question += 1) {
    sum += await learns(handshake, decodeHandshakeReply);
    sum += await learns(encodeLeaseQuery(query), decodeLeaseReply);
  }
  await stranger.close();
  return sum;
}

export async function strangerWithoutKey(): Promise<Row> {
  const folder = mkdtempSync(join(tmpdir(), "kv-attacks-"));
  const keyFile = join(folder, "key");
  writeFileSync(keyFile, "the key of the honest engines");
  let [failed, notifications, learnt, violations] = [0, 0, 0, 0];
  for (const connector of ["pull", "push"] as const) {
    const extra = { require_kv_peer: true, handshake_key_file: keyFile };
    const engines = await startEngines(connector, extra);
    for (let round = 0; round < ROUNDS; round += 1) {
      const victim = await engines.prefill(`v${round}`, round);
      const own = await engines.prefill(`own${round}`, 100_000 + round);
      const answer = engines.decode(`d${round}`, round, victim);
      notifications += engines.forge(engines.known(victim, own, { decodeRequestId: `d${round}` }));
      learnt += await learned(engines.port, `v${round}`);
      if ((await answer) !== "ok") failed += 1;
    }
    violations += engines.violations.length;
  }
  rmSync(folder, { recursive: true });

  return rowOf(
    "a stranger without the required key: side channel and forged notifications, pull and push",
    `${4 * ROUNDS * QUESTIONS} questions, ${notifications} notifications beside ${2 * ROUNDS} requests of users`,
    [
      [`${learnt} questions told something`, learnt === 0],
      [`${failed} users failed`, failed === 0],
      [`${violations} with wrong bytes`, violations === 0],
    ],
  );
}
