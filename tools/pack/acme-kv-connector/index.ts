import { ambient, type ConnectorModule, type SchedulerConnector, type WorkerConnector } from "@kv/interface";
import { createPullScheduler, createPullWorker } from "@kv/pull";

// A connector as a third party might publish it: the pull connector under another name, with a metric of its own.

export const ACME = "AcmeConnector";
export const RECEIVED = "acme_kv_requests_received";

/** Exported under the connector's name, so that it is found beside other exports. */
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
