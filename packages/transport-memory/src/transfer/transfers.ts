import {
  KvError,
  type KvErrorCode,
  type Timer,
  type Transfer,
  type TransferRequest,
  type TransferResult,
} from "@kv/interface";
import type { ListRecord } from "../agent/prepared-lists.js";
import { deferred } from "../deferred.js";
import type { AgentEndpoint, Fabric, PeerAddress } from "../network/fabric.js";
import { copyPlan } from "./copy-plan.js";
import { type Landing, startLanding } from "./landing.js";

export interface TransferCounters {
  transfersPosted: number;
  transfersDone: number;
  transfersFailed: number;
  bytesTransferred: number;
  notificationsSent: number;
}

/** The transfers of one agent. */
export interface Transfers {
  readonly inFlight: number;
  start(request: TransferRequest, local: ListRecord, remote: ListRecord, peer: PeerAddress): Transfer;
  /** Gives up all. */
  abortAll(reason: string): void;
  /** Resolves when all that are in flight now have been released. */
  allReleased(): Promise<void>;
  halt(): void;
}

interface Flight {
  landing: Landing | undefined;
  giveUp(code: KvErrorCode, why: string, cause?: unknown): void;
  readonly released: Promise<void>;
}

export function transfers(fabric: Fabric, self: AgentEndpoint, counters: TransferCounters): Transfers {
  const flights = new Set<Flight>();
  const clock = self.host.clock;

  function start(
    request: TransferRequest,
    local: ListRecord,
    remote: ListRecord,
    peer: PeerAddress,
  ): Transfer {
    const { operation, signal, timeoutMs } = request;
    if (operation !== "READ" && operation !== "WRITE") throw invalid(`operation ${String(operation)}`);
    if (timeoutMs !== undefined && !(timeoutMs > 0 && timeoutMs < 2 ** 31))
      throw invalid(`timeoutMs ${timeoutMs}`);
    const { notification: given } = request;
    if (given !== undefined && !(given instanceof Uint8Array))
      throw invalid("the notification is not a Uint8Array");
    const notification = given?.slice();
    const plan = copyPlan(
      request,
      { name: "local", rows: local.rows },
      { name: "remote", rows: remote.rows },
    );
    const { descriptorCount, mergedCount } = plan;
    const what = `${operation} of ${descriptorCount} descriptors with agent ${peer.name}`;

    counters.transfersPosted += 1;
    const beganMs = clock.now();
    const done = deferred<TransferResult>();
    const released = deferred<void>();
    // Whoever awaits `done` sees the error; a caller that only waits for `released` is no unhandled rejection.
    done.promise.catch(() => {});
    let settled = false;
    let timer: Timer | undefined;

    function settle(): boolean {
      if (settled) return false;
      settled = true;
      timer?.cancel();
      signal?.removeEventListener("abort", onAbort);
      return true;
    }
    function fail(error: KvError): void {
      if (!settle()) return;
      counters.transfersFailed += 1;
      done.reject(error);
    }
    const flight: Flight = {
      landing: undefined,
      released: released.promise,
      giveUp(code, why, cause) {
        fail(new KvError(code, `${what} ${why}`, { cause }));
        flight.landing?.giveUp();
      },
    };
    function onAbort(): void {
      flight.giveUp("KV_TRANSFER_ABORTED", "was aborted by its signal", signal?.reason);
    }
    function release(): void {
      flights.delete(flight);
      local.users.delete(released.promise);
      remote.users.delete(released.promise);
      released.resolve();
    }

    flights.add(flight);
    local.users.add(released.promise);
    remote.users.add(released.promise);
    if (signal?.aborted) {
      onAbort();
      release();
      return { done: done.promise, released: released.promise };
    }
    signal?.addEventListener("abort", onAbort);
    if (timeoutMs !== undefined) {
      timer = clock.setTimer(
        () => flight.giveUp("KV_TRANSFER_TIMEOUT", `did not end within ${timeoutMs} ms`),
        timeoutMs,
        { ref: true },
      );
    }
    flight.landing = startLanding({
      fabric,
      from: self,
      to: peer,
      operation,
      plan,
      released: release,
      failed: fail,
      landed() {
        if (!settle()) return;
        const refusal = notification && fabric.post({ from: self, to: peer, payload: notification });
        if (refusal !== undefined) {
          counters.transfersFailed += 1;
          done.reject(refusal);
          return;
        }
        counters.transfersDone += 1;
        counters.bytesTransferred += plan.lengthBytes;
        if (notification !== undefined) counters.notificationsSent += 1;
        done.resolve({
          lengthBytes: plan.lengthBytes,
          descriptorCount,
          mergedCount,
          postMs: 0,
          transferMs: clock.now() - beganMs,
        });
      },
    });
    return { done: done.promise, released: released.promise };
  }

  return {
    get inFlight() {
      return flights.size;
    },
    start,
    abortAll(reason) {
      for (const flight of [...flights]) flight.giveUp("KV_TRANSFER_ABORTED", `was given up: ${reason}`);
    },
    async allReleased() {
      await Promise.all([...flights].map((flight) => flight.released));
    },
    halt() {
      for (const flight of flights) flight.landing?.halt();
      flights.clear();
    },
  };
}

function invalid(message: string): KvError {
  return new KvError("KV_TRANSFER_INVALID", `a transfer cannot begin: ${message}`);
}
