import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import {
  decodeHandshakeReply,
  decodeLeaseReply,
  encodeHandshakeRequest,
  encodeLeaseQuery,
  newCapability,
} from "@kv/protocol";
import { zmqSideChannel } from "@kv/side-channel";
import type { AttackResult } from "./support/attack.js";
import { isolationEngines } from "./support/isolation-child.js";

const ROUNDS = 150;
/** Handshakes and lease questions of each round. */
const QUESTIONS = 10;

interface Counts {
  users: number;
  failed: number;
  notifications: number;
  questions: number;
  /** Questions that told a stranger something. */
  learned: number;
  violations: number;
}

/** A stranger's questions to P's side channel, about a user's request; counts what it learns. */
async function ask(port: number, requestId: string, counts: Counts): Promise<void> {
  const stranger = zmqSideChannel();
  const request = (frames: readonly Uint8Array[]) =>
    stranger.request({ host: "127.0.0.1", port, frames, timeoutMs: 2000 });
  for (let at = 0; at < QUESTIONS; at += 1) {
    counts.questions += 2;
    const handshake = await request([encodeHandshakeRequest({ ppRank: 0, tpRank: 0 })]).catch(
      () => undefined,
    );
    try {
      if (handshake !== undefined) {
        decodeHandshakeReply(handshake.frames);
        counts.learned += 1;
      }
    } catch {
      // A refusal.
    }
    const query = {
      engineId: "p",
      requestId,
      generation: 1,
      capability: newCapability(),
      blocks: undefined,
    };
    const lease = await request([encodeLeaseQuery(query)]).catch(() => undefined);
    if (lease !== undefined && decodeLeaseReply(lease.frames) !== undefined) counts.learned += 1;
  }
  await stranger.close();
}

async function play(connector: "pull" | "push", keyFile: string, counts: Counts): Promise<void> {
  const { call, close } = isolationEngines();
  const extra = { require_kv_peer: true, handshake_key_file: keyFile };
  const { rogue, prefill } = await call("start", connector, extra);
  for (let round = 0; round < ROUNDS; round++) {
    const victim = await call("prefill", `v${round}`, round);
    const own = await call("prefill", `own${round}`, 100_000 + round);
    const known = { victim, own, rogue, decodeRequestId: `d${round}` };
    const answer = call("decode", `d${round}`, round, victim);
    counts.notifications += await call("forge", known);
    await ask(prefill.port, `v${round}`, counts);
    counts.users += 1;
    if ((await answer) !== "ok") counts.failed += 1;
  }
  counts.violations += (await call("violations")).length;
  close();
}

/**
 * A stranger without the key, at a P and a D that require it, pull and push: handshakes, lease
 * questions, forged completions, heartbeats, registrations and withdrawals for the requests of
 * users.
 */
export async function run(): Promise<AttackResult> {
  const folder = mkdtempSync(join(tmpdir(), "kv-attacks-"));
  const keyFile = join(folder, "key");
  writeFileSync(keyFile, "the key of the honest engines");
  const counts: Counts = {
    users: 0,
    failed: 0,
    notifications: 0,
    questions: 0,
    learned: 0,
    violations: 0,
  };
  for (const connector of ["pull", "push"] as const) await play(connector, keyFile, counts);
  rmSync(folder, { recursive: true });
  const { users, failed, notifications, questions, learned, violations } = counts;
  return {
    attack:
      "a stranger without the required key: side channel and forged notifications, pull and push",
    tries: `${questions} questions, ${notifications} notifications beside ${users} requests of users`,
    result: `${learned} questions told something, ${failed} users failed, ${violations} with wrong bytes`,
    ok: learned + failed + violations === 0,
  };
}
