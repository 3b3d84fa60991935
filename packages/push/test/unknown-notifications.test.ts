import { itIgnoresUnknownNotifications } from "@kv/testing/scenarios/unknown-notifications";
import { pushConnector } from "../src/index.js";

itIgnoresUnknownNotifications(pushConnector);
