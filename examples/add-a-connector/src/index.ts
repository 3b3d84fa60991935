import type { ConnectorModule } from "@kv/interface";
import { createFolderScheduler } from "./scheduler.js";
import { FOLDER } from "./step.js";
import { createFolderWorker } from "./worker.js";

export const folderConnector: ConnectorModule = {
  name: FOLDER,
  createScheduler: createFolderScheduler,
  createWorker: createFolderWorker,
};

export default folderConnector;
