import { REAL } from "../support/libraries.js";
import { agentCases } from "./agent-cases.js";

agentCases(REAL);
