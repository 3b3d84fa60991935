import { itSleepsAndWakes } from "@kv/testing/scenarios/sleep-mode";
import { pushConnector } from "../src/index.js";

itSleepsAndWakes(pushConnector, "WRITE");
