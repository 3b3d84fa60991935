import type { Log, LogFields } from "@kv/interface";
import { sameCapability } from "@kv/protocol";

/** A request of P that peers send messages about. */
export interface GuardedRequest {
  /** The engine's id of the request. */
  readonly requestId: string;
  /** The request's capability; undefined where nothing but the id is known. */
  readonly capability?: string | undefined;
  /** Whether a peer has proved that it holds the request's parameters. */
  isProven: boolean;
}

/** Options of `MessageGuard`. */
export interface MessageGuardOptions {
  /** `require_kv_peer`: messages without a capability act on nothing. */
  readonly requiresKvPeer: boolean;
  /**
   * Gets one warning when a message in vLLM's form acts on a request, and one when a message is
   * refused; further refusals are for `debug`.
   */
  readonly log: Log;
}

/**
 * Decides whether a peer's message may act on a request of P: free its blocks or extend its lease.
 * A message with a capability must have the request's. One without, in vLLM's form, is accepted
 * only where plain vLLM peers are, and only until a peer has proved that it holds the request's
 * parameters: the request then belongs to an `@kv` D, which does not send this form.
 */
export class MessageGuard {
  readonly #options: MessageGuardOptions;
  #hasWarned = false;
  #hasRefused = false;

  constructor(options: MessageGuardOptions) {
    this.#options = options;
  }

  /**
   * Whether the message from the agent `from` may act on the request. `capability` is the
   * message's; undefined for vLLM's form.
   */
  mayAct(request: GuardedRequest, capability: string | undefined, from: string): boolean {
    const { log, requiresKvPeer } = this.#options;
    const { requestId } = request;
    if (capability !== undefined) {
      if (request.capability !== undefined && sameCapability(request.capability, capability)) {
        request.isProven = true;
        return true;
      }
      this.#refused("message-with-wrong-capability", { requestId, from });
      return false;
    }
    if (requiresKvPeer || request.isProven) {
      this.#refused("message-without-capability", { requestId, from, setting: "require_kv_peer" });
      return false;
    }
    if (!this.#hasWarned) {
      this.#hasWarned = true;
      log.warn("plain-peer-accepted", {
        requestId,
        from,
        consequence:
          "whoever reaches this agent and knows a request id can free or hold the request's blocks",
        remedy:
          "set kv_connector_extra_config.require_kv_peer to true where all decode workers are @kv",
      });
    }
    return true;
  }

  /** A flood of forged messages must not become a flood of log lines. */
  #refused(event: string, fields: LogFields): void {
    this.#options.log[this.#hasRefused ? "debug" : "warn"](event, fields);
    this.#hasRefused = true;
  }
}
