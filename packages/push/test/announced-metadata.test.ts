import { itReadsAnnouncedMetadata } from "@kv/testing/scenarios/announced-metadata";
import { pushConnector } from "../src/index.js";

itReadsAnnouncedMetadata(pushConnector);
