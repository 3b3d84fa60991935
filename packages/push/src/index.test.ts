import {
  itIsFoundByItsNames,
  itRefusesWhatDoesNotFit,
} from "@kv/testing/scenarios/connector-module";
import { PUSH_CONNECTOR_NAMES, pushConnector, registerPushConnector } from "./index.js";

itIsFoundByItsNames(
  pushConnector,
  PUSH_CONNECTOR_NAMES,
  registerPushConnector,
  () => import("./index.js"),
);
itRefusesWhatDoesNotFit(pushConnector);
