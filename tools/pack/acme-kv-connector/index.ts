import { ambient, type ConnectorModule, type SchedulerConnector, type WorkerConnector } from "@kv/interface";
import { createPullScheduler, createPullWorker } from "@kv/pull";

// What a third party might publish: pull's road under a name of its own, with a count of what it has brought.

export const ACME = "AcmeConnector";
export const RECEIVED = "acme_kv_requests_received";

/** By the connector's name, so that it is found beside other exports. */
export const AcmeConnector: ConnectorModule = {
  name: ACME,
  createScheduler: (options): SchedulerConnector => ({ ...createPullScheduler(options), name: ACME }),
  createWorker(options): WorkerConnector {
    const { metrics } = ambient(options);
    const worker = createPullWorker(options);
    return {
      ...worker,
      name: ACME,
      collectFinished() {
        const output = worker.collectFinished();
        const arrived = output.finishedReceiving.length - output.failedReceiving.length;
        if (arrived > 0) metrics.count(RECEIVED, arrived);
        return output;
      },
    };
  },
};
