import type { Messages, Peers, RemoteLink, TransferMetrics } from "@kv/connector";
import type { Log } from "@kv/interface";
import { encodeRegistration, encodeWithdrawal, PUSH_CONTROL, type Registrant } from "../control.js";
import type { RegistrationOrder } from "../step-metadata.js";

/** What the sender works with, and what it says of this engine. */
export interface RegistrationSenderOptions {
  readonly messages: Pick<Messages, "send">;
  readonly metrics: Pick<TransferMetrics, "notificationFailed">;
  readonly log: Log;
  readonly peers: Pick<Peers<RemoteLink>, "drop">;
  /** This engine and this rank of it. */
  readonly engineId: string;
  readonly tpSize: number;
  readonly tpRank: number;
}

/** Sends registrations and withdrawals to the ranks of producers. */
export class RegistrationSender {
  readonly #options: RegistrationSenderOptions;
  /** This consumer's process, as the latest step names it. */
  incarnation = "";

  constructor(options: RegistrationSenderOptions) {
    this.#options = options;
  }

  /** Registers the order's blocks with one rank. False if the transport did not take the message; the link is dropped then. */
  register(order: RegistrationOrder, link: RemoteLink, agent: string): Promise<boolean> {
    const { messages, metrics, log, peers } = this.#options;
    const payload = encodeRegistration(order, this.#registrant(), link.features.has(PUSH_CONTROL));
    return messages.send(agent, payload, (error) => {
      metrics.notificationFailed();
      log.warn("push_reg_notif_failed", { requestId: order.requestId, agent, error: String(error) });
      peers.drop(order.remote.engineId, String(error), link);
    });
  }

  /**
   * Withdraws the order's blocks from these ranks. Best effort: if the message is lost, it is repeated, or P frees the blocks when the
   * lease ends. A vLLM producer gets no withdrawal, because its protocol has none.
   */
  withdraw(order: RegistrationOrder, link: RemoteLink, agents: Iterable<string>): void {
    const { messages, log } = this.#options;
    if (!link.features.has(PUSH_CONTROL)) return;
    const payload = encodeWithdrawal(order, this.#registrant());
    for (const agent of agents) {
      void messages.send(agent, payload, (error) =>
        log.debug("push-withdrawal-failed", { requestId: order.requestId, agent, error: String(error) }),
      );
    }
  }

  #registrant(): Registrant {
    const { engineId, tpSize, tpRank } = this.#options;
    return { engineId, tpSize, tpRank, incarnation: this.incarnation };
  }
}
