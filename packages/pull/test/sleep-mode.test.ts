import { itSleepsAndWakes } from "@kv/testing/scenarios/sleep-mode";
import { pullConnector } from "../src/index.js";

itSleepsAndWakes(pullConnector, "READ");
