import {
  type Clock,
  KvError,
  type PreparedList,
  type Transfer,
  type TransferRequest,
  type TransferResult,
} from "@kv/interface";
import type { NativeAgent, NativeOutcome } from "../addon/native.js";
import { callNative } from "../addon/native-errors.js";
import { requireObject, shown } from "../validate.js";
import type { Tickets } from "./pending-calls.js";

/** The transfers of one agent: what the thread tells of them, and who has given up on which. */
export interface Transfers {
  start(request: TransferRequest): Transfer;
  done(ticket: number, error: KvError | undefined, value: unknown): void;
  released(ticket: number): void;
  /** Transfers whose signal had been aborted before they began, which the thread never saw. */
  readonly stillborn: number;
}

interface Running {
  settle(error: KvError | undefined, result: TransferResult | undefined): void;
  release(): void;
}

export interface TransfersOptions {
  native: NativeAgent;
  tickets: Tickets;
  clock: Clock;
  /** The ticket under which the addon knows a list. Errors: `KV_TRANSFER_INVALID` for another agent's. */
  listTicket(list: PreparedList): number;
}

export function transfers({ native, tickets, clock, listTicket }: TransfersOptions): Transfers {
  const running = new Map<number, Running>();
  let stillborn = 0;

  return {
    get stillborn() {
      return stillborn;
    },
    start(request) {
      const [seconds, nanoseconds] = process.hrtime();
      requireObject(request, "KV_TRANSFER_INVALID", "a transfer");
      const {
        operation,
        local,
        remote,
        localIds,
        remoteIds,
        runs,
        offsets,
        notification,
        signal,
        timeoutMs,
      } = request;
      if (operation !== "READ" && operation !== "WRITE") {
        throw new KvError("KV_TRANSFER_INVALID", `operation is ${shown(operation)}, not READ or WRITE`);
      }
      if (
        timeoutMs !== undefined &&
        !(typeof timeoutMs === "number" && timeoutMs > 0 && timeoutMs < 2 ** 31)
      ) {
        throw new KvError(
          "KV_TRANSFER_INVALID",
          `timeoutMs is ${shown(timeoutMs)}, not a number between 0 and 2^31`,
        );
      }
      // Before anything is posted: a transfer that nobody can be told of would never be released.
      if (signal !== undefined && !isSignal(signal)) {
        throw new KvError("KV_TRANSFER_INVALID", `signal is ${shown(signal)}, not an AbortSignal`);
      }
      if (notification !== undefined && !(notification instanceof Uint8Array)) {
        throw new KvError("KV_TRANSFER_INVALID", "the notification is not a Uint8Array");
      }
      const [localTicket, remoteTicket] = [listTicket(local), listTicket(remote)];
      if (notification !== undefined && (remote.memoryType === "FILE" || remote.memoryType === "OBJ")) {
        throw new KvError(
          "KV_TRANSFER_INVALID",
          "a transfer with storage has no peer to notify, and this one has a notification",
        );
      }
      if (signal?.aborted === true) {
        stillborn++;
        return {
          done: unawaited(Promise.reject(abortedError(operation, signal))),
          released: Promise.resolve(),
        };
      }
      const revocable = signal !== undefined || timeoutMs !== undefined;
      const ticket = tickets.next();
      callNative(() =>
        native.transfer(
          ticket,
          operation === "WRITE",
          localTicket,
          remoteTicket,
          localIds,
          remoteIds,
          runs,
          offsets,
          notification,
          revocable,
          seconds * 1e3 + nanoseconds / 1e6,
        ),
      );
      const over = tickets.hold();
      let release = () => {};
      const released = new Promise<void>((resolve) => {
        release = resolve;
      });
      const done = new Promise<TransferResult>((resolve, reject) => {
        const forget = () => {
          timer?.cancel();
          signal?.removeEventListener("abort", onAbort);
        };
        const giveUp = (error: KvError) => {
          // Too late, when the outcome is decided already and its notification may be under way.
          if (!native.abort(ticket)) return;
          forget();
          reject(error);
        };
        const onAbort = () => giveUp(abortedError(operation, signal));
        const onTimeout = () =>
          giveUp(
            new KvError(
              "KV_TRANSFER_TIMEOUT",
              `${operation} from or to ${remote.remote} took longer than ${timeoutMs} ms`,
              {
                details: { operation, remote: remote.remote, timeoutMs },
              },
            ),
          );
        signal?.addEventListener("abort", onAbort, { once: true });
        const timer = timeoutMs === undefined ? undefined : clock.setTimer(onTimeout, timeoutMs);
        running.set(ticket, {
          settle(error, result) {
            forget();
            if (error === undefined) resolve(result as TransferResult);
            else reject(error);
          },
          release() {
            over();
            release();
          },
        });
      });
      return { done: unawaited(done), released };
    },
    done(ticket, error, value) {
      const found = running.get(ticket);
      if (error !== undefined) {
        found?.settle(error, undefined);
        return;
      }
      // A success is told only when the last handle is gone: it is the release too, which comes first.
      running.delete(ticket);
      found?.release();
      found?.settle(undefined, resultOf(value as NativeOutcome));
    },
    released(ticket) {
      const found = running.get(ticket);
      running.delete(ticket);
      found?.release();
    },
  };
}

function resultOf(outcome: NativeOutcome): TransferResult {
  const [lengthBytes, descriptorCount, mergedCount, prepareMs, makeMs, postMs, transferMs] = outcome;
  return { lengthBytes, descriptorCount, mergedCount, prepareMs, makeMs, postMs, transferMs };
}

/** By what is used of it: an `AbortSignal` of another realm is no instance of this one's class. */
function isSignal(value: unknown): value is AbortSignal {
  if (typeof value !== "object" || value === null) return false;
  const { aborted, addEventListener, removeEventListener } = value as Partial<AbortSignal>;
  return (
    typeof aborted === "boolean" &&
    typeof addEventListener === "function" &&
    typeof removeEventListener === "function"
  );
}

function abortedError(operation: string, signal: AbortSignal | undefined): KvError {
  return new KvError("KV_TRANSFER_ABORTED", `${operation} was aborted by its caller`, {
    cause: signal?.reason,
  });
}

/** Whoever awaits it sees the error; a caller that waits only for `released` causes no unhandled rejection. */
function unawaited<T>(promise: Promise<T>): Promise<T> {
  promise.catch(() => {});
  return promise;
}
