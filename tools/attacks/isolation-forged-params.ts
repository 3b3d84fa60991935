import type { KvTransferParams } from "@kv/interface";
import type { AttackResult } from "./support/attack.js";
import { isolationEngines } from "./support/isolation-child.js";

const ROUNDS = 150;
const MAX_GROWTH_MIB = 512;

/**
 * Parameters that a client of D writes itself: another user's blocks, ids and addresses, an
 * attacker's listener under P's name, later registrations, wrong sizes, closed ports, and millions
 * of block ids, while users send requests.
 */
export async function run(): Promise<AttackResult> {
  const { call, ...engines } = isolationEngines();
  const { rogue } = await call("start", "pull", { require_kv_peer: true });
  const before = engines.rssMib();
  // A forged registration waits for a handshake beside the open engine, one a second: the rounds do
  // not wait for the forgeries.
  const forged: Promise<string>[] = [];
  let [users, wrongUsers] = [0, 0];
  for (let round = 0; round < ROUNDS; round++) {
    const victim = await call("prefill", `v${round}`, round);
    const own = await call("prefill", `own${round}`, 100_000 + round);
    const forgeries: KvTransferParams[] = [
      { ...own, remote_block_ids: victim.remote_block_ids },
      { ...victim, kv_peer: own.kv_peer },
      { ...victim, kv_peer: null },
      { ...own, remote_port: rogue.port, remote_registration_generation: 1000 + round },
      { ...own, remote_registration_generation: 1000 + round },
      { ...own, tp_size: 2 },
      { ...own, remote_engine_id: `q${round}` },
      { ...own, remote_port: 1 },
      { ...own, remote_block_ids: [[1, 1, 2, 3, 4]] },
    ];
    if (round % 30 === 0)
      forgeries.push({
        ...own,
        remote_block_ids: [Array.from({ length: 3_000_000 }, (_, i) => i)],
      });
    for (const [index, params] of forgeries.entries())
      forged.push(call("decode", `x${round}-${index}`, 100_000 + round, params));
    users += 1;
    if ((await call("decode", `d${round}`, round, victim)) !== "ok") wrongUsers += 1;
  }
  const outcomes = await Promise.all(forged);
  const accepted = outcomes.filter((outcome) => outcome === "ok").length;
  const violations = await call("violations");
  const growth = engines.rssMib() - before;
  engines.close();
  const ok = accepted + wrongUsers + violations.length === 0 && growth < MAX_GROWTH_MIB;
  return {
    attack: "kv_transfer_params that a client of D has written",
    tries: `${outcomes.length} forged requests beside ${users} of users`,
    result: `${accepted} accepted, ${wrongUsers} users failed, ${violations.length} with wrong bytes; ${growth >= 0 ? "+" : ""}${growth} MiB`,
    ok,
  };
}
