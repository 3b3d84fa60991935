import { itServesTheShapesOfTheGuide } from "@kv/testing/scenarios/guide-shapes";
import { pushConnector } from "../src/index.js";

itServesTheShapesOfTheGuide(pushConnector);
