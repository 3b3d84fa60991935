import {
  endWith,
  type RemoteEngine,
  type RemoteEngines,
  type WorkerContext,
} from "@kv/connector/building-blocks";
import { encodeRegistration, encodeWithdrawal, PUSH_CONTROL, type Registrant } from "@kv/protocol";
import type { RegistrationOrder } from "./step-metadata.js";

/** Sends registrations and withdrawals to the ranks of producers. */
export class RegistrationSender {
  readonly #context: Pick<WorkerContext, "log" | "metrics" | "notifications" | "options" | "tracer">;
  readonly #engines: Pick<RemoteEngines, "drop">;
  /** The incarnation of this consumer's process, from the latest step. */
  incarnation = "";

  constructor(
    context: Pick<WorkerContext, "log" | "metrics" | "notifications" | "options" | "tracer">,
    engines: Pick<RemoteEngines, "drop">,
  ) {
    this.#context = context;
    this.#engines = engines;
  }

  /** Registers the order's blocks with one rank. Resolves with false if the transport could not send the message; the engine is then dropped. */
  register(order: RegistrationOrder, engine: RemoteEngine, agent: string): Promise<boolean> {
    const { notifications, metrics, log, tracer } = this.#context;
    const span = tracer?.start("kv.register", {
      parent: order.remote.traceparent,
      attributes: { "kv.remote_agent": agent },
    });
    const payload = encodeRegistration(order, this.#registrant(), engine.features.has(PUSH_CONTROL));
    const sent = notifications.send(agent, payload, (error) => {
      metrics.notificationFailed();
      span?.end(error);
      log.warn("push_reg_notif_failed", { requestId: order.requestId, agent, error: String(error) });
      this.#engines.drop(engine, String(error));
    });
    return endWith(span, sent);
  }

  /**
   * Withdraws the order's blocks from these ranks. Best effort: if the message is lost, it is repeated, or P frees the blocks when the
   * lease ends. A vLLM producer gets no withdrawal, because its protocol has none.
   */
  withdraw(order: RegistrationOrder, engine: RemoteEngine, agents: Iterable<string>): void {
    const { notifications, log } = this.#context;
    if (!engine.features.has(PUSH_CONTROL)) return;
    const payload = encodeWithdrawal(order, this.#registrant());
    for (const agent of agents) {
      void notifications.send(agent, payload, (error) =>
        log.debug("push-withdrawal-failed", { requestId: order.requestId, agent, error: String(error) }),
      );
    }
  }

  #registrant(): Registrant {
    const { engine, tpRank } = this.#context.options;
    const { engineId, tpSize } = engine;
    return { engineId, tpSize, tpRank, incarnation: this.incarnation };
  }
}
