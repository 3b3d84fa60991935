import { existsSync } from "node:fs";
import { join } from "node:path";
import { fields } from "./fields.js";
import { Difference, type Outcome } from "./outcome.js";
import { filesEnding, type Recorded, readRecords, record } from "./recordings.js";
import { checkCompatibilityHash, checkHandshake, checkNotification } from "./wire-codecs.js";
import {
  checkDescriptorIds,
  checkMappings,
  checkTransfer,
  type ExchangedBlocks,
  exchangedBlocks,
  type RecordedRun,
  recordedRun,
} from "./wire-transfers.js";

export type Count = (where: string, outcome: Outcome) => void;

/** Missing kinds of files are skipped; see README, "Conformance". */
export function replayWire(folder: string, count: Count): void {
  const attempt = (where: string, check: () => void) => {
    try {
      check();
      count(where, { kind: "passed" });
    } catch (error) {
      const reason =
        error instanceof Difference
          ? error.message
          : error instanceof Error
            ? error.stack
            : String(error);
      count(where, { kind: "failed", reason: reason ?? "" });
    }
  };
  const lines = (path: string, check: (line: Recorded) => void) => {
    for (const [index, line] of readRecords(path).entries()) {
      if (!("meta" in line && Object.keys(line).length === 1))
        attempt(`${path}:${index + 1}`, () => check(line));
    }
  };
  if (!existsSync(folder)) {
    count(folder, { kind: "failed", reason: "no such folder" });
    return;
  }
  for (const frames of [folder, join(folder, "handshake")]) {
    const recorded = filesEnding(frames, ".req.bin").map((path) =>
      path.replace(/req\.bin$/, "json"),
    );
    for (const path of recorded) attempt(path, () => checkHandshake(path));
  }
  for (const path of filesEnding(folder, ".notifs.jsonl")) lines(path, checkNotification);
  for (const path of filesEnding(folder, "compat_hash.jsonl")) lines(path, checkCompatibilityHash);
  for (const path of filesEnding(folder, ".xfers.jsonl")) replayTransfers(path, attempt);
}

function replayTransfers(path: string, attempt: (where: string, check: () => void) => void): void {
  const beside = (kind: string) => {
    const other = path.replace(/xfers\.jsonl$/, `${kind}.jsonl`);
    return existsSync(other) ? readRecords(other) : [];
  };
  let run: RecordedRun | undefined;
  attempt(`${path}: both sides' metadata`, () => {
    run = recordedRun(beside("kv_caches"), beside("handshake_agents"));
  });
  if (run === undefined) return;
  for (const [pid, worker] of run.workers) {
    if (worker.mappings.length > 0)
      attempt(`${path}: mappings of process ${pid}`, () => checkMappings(worker));
  }
  const [metadata, notifications] = [beside("connector_meta"), beside("notifs")];
  // A worker computes the remote's ids, then its own, then posts the transfer.
  const calls = new Map<unknown, Recorded[]>();
  const posted = new Map<string, number>();
  for (const [index, line] of readRecords(path).entries()) {
    const where = `${path}:${index + 1}`;
    if (line["compute_desc_ids"] !== undefined) {
      calls.set(line["pid"], [...(calls.get(line["pid"]) ?? []), line].slice(-2));
      attempt(where, () => checkDescriptorIds(line));
    } else if (line["op"] !== undefined) {
      const worker = run.workers.get(Number(line["pid"]));
      const key = `${line["pid"]} ${line["notif"]}`;
      const nth = posted.get(key) ?? 0;
      posted.set(key, nth + 1);
      attempt(where, () => {
        if (worker === undefined)
          throw new Difference("the worker's caches are needed, and are not recorded");
        const exchanged =
          exchangedBlocks(line, { metadata, notifications, proc: worker.proc }) ??
          askedBlocks(calls.get(line["pid"]) ?? []);
        checkTransfer(worker, exchanged, line, nth);
      });
    }
  }
}

/** Of the last two `_compute_desc_ids` calls, for a recording without step metadata. */
function askedBlocks([remote, local]: readonly Recorded[]): ExchangedBlocks {
  const blockIds = (call: Recorded | undefined) =>
    fields(record(call?.["compute_desc_ids"], "compute_desc_ids")).blockIds("block_ids");
  return { localBlockIds: blockIds(local), remoteBlockIds: blockIds(remote) };
}
