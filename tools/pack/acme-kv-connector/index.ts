import { delegateTo } from "@kv/connector/building-blocks";
import {
  ambient,
  type ConnectorModule,
  type SchedulerConnector,
  type WorkerConnector,
} from "@kv/interface";
import { createPullScheduler, createPullWorker } from "@kv/pull";

// A third party's connector: pull under a name of its own, with a counter of received requests.

export const ACME = "AcmeConnector";
export const RECEIVED = "acme_kv_requests_received";

/** Exported under the connector's name, so that the registry finds it beside other exports. */
export const AcmeConnector: ConnectorModule = {
  name: ACME,
  createScheduler: (options): SchedulerConnector =>
    delegateTo<SchedulerConnector>(createPullScheduler(options), { name: ACME }),
  createWorker(options): WorkerConnector {
    const { metrics } = ambient(options);
    const worker: WorkerConnector = createPullWorker(options);
    return delegateTo(worker, {
      name: ACME,
      collectFinished() {
        const output = worker.collectFinished();
        const arrived = output.finishedReceiving.length - output.failedReceiving.length;
        if (arrived > 0) metrics.count(RECEIVED, arrived);
        return output;
      },
    });
  },
};
