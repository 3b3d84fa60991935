import { itIgnoresUnknownNotifications } from "@kv/testing/scenarios/unknown-notifications";
import { pullConnector } from "../src/index.js";

itIgnoresUnknownNotifications(pullConnector);
