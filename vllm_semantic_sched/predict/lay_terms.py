# ruff: noqa: E501 - one sentence a line, however long
"""Everyday words for the survey's coded reasons for a visit."""

import random
import re

_LAY: dict[str, str] = {
    "Abdominal pain, cramps, spasms, NOS": "stomach pain|belly pain|bad stomach cramps|abdominal pain|a stomach ache",
    "Cough": "a cough|a bad cough|coughing",
    "Vomiting": "vomiting|throwing up|puking",
    "Nausea": "nausea|an upset stomach|a sick feeling in the stomach",
    "Fever": "a fever|a high temperature|fever and feeling hot",
    "Chest pain": "chest pain|pain in the chest|chest hurting",
    "Shortness of breath": "shortness of breath|trouble catching a breath|being short of breath",
    "Labored or difficult breathing (dyspnea)": "difficulty breathing|laboured breathing|a hard time breathing",
    "Breathing problems, NEC": "breathing problems|trouble breathing",
    "Headache, pain in head": "a headache|head pain|a pounding headache",
    "Accident, NOS": "an accident|injuries from an accident",
    "Injury, other and unspecified": "an injury",
    "Injury, multiple or unspecified": "several injuries",
    "Vertigo - dizziness": "dizziness|dizzy spells|the room spinning",
    "Diarrhea": "diarrhea|the runs|watery diarrhoea",
    "Nasal congestion": "a stuffy nose|a blocked nose",
    "Hypertension": "high blood pressure|hypertension",
    "Throat soreness": "a sore throat",
    "Pain, unspecified": "pain all over|pain",
    "General weakness": "weakness all over|general weakness|no strength",
    "Motor vehicle accident, type": "injuries from a car accident|a car accident|a car crash",
    "Anxiety and nervousness": "anxiety|panic|bad nerves",
    "Side pain, flank pain": "side pain|flank pain|pain in the side",
    "Skin rash": "a rash|a skin rash",
    "Medication, other and unspecified kinds": "a medication request|a need for medicine|a prescription refill request",
    "Fainting (syncope)": "fainting|a fainting spell|passing out",
    "Convulsions": "a seizure|seizures|convulsions|a fit",
    "Loss of feeling (anesthesia)": "numbness|loss of feeling",
    "Depression": "depression|feeling very low",
    "Tiredness, exhaustion": "exhaustion|feeling worn out|tiredness",
    "Painful urination": "pain when peeing|burning when urinating",
    "Wheezing": "wheezing",
    "Contusions/abrasions/bruises": "bruises and scrapes|scrapes|bruising",
    "Chest discomfort, pressure, tightness": "chest tightness|pressure in the chest|chest discomfort",
    "Medical counseling, NOS": "questions for a doctor|a need for medical advice",
    "Edema": "swelling|fluid swelling",
    "Carbuncle, furuncle, boil": "a boil|an abscess",
    "Disorders of motor functions": "trouble moving properly|trouble walking",
    "Surgical Complications": "problems after surgery|a complication after an operation",
    "Postoperative visit": "a check after surgery|a post-op visit",
    "Functional psychoses": "psychosis|paranoid behaviour",
    "Decreased appetite": "no appetite|not eating much",
    "Laceration/cut of facial area": "a cut on the face|a facial cut",
    "Laceration/cut of upper extremity": "a cut on the arm or hand|a cut hand|a cut finger",
    "Laceration/cut of lower extremity": "a cut on the leg|a cut foot",
    "Laceration/cut of head and neck area": "a cut on the head|a head wound",
    "Abnormal pulsations and palpitations": "palpitations|a pounding heart",
    "Adverse effect of alcohol": "being very drunk|too much alcohol|alcohol intoxication",
    "Alcohol-related problems": "alcohol problems|drinking problems",
    "Abnormal drug usage": "drug use|having taken drugs",
    "Adverse effect of drug abuse": "a drug overdose|a bad reaction to drugs",
    "Overdose, intentional": "an intentional overdose|pills taken on purpose",
    "Suicide attempt": "a suicide attempt",
    "Intentional self-mutilation": "self-inflicted cuts|self harm",
    "Abnormal sensation (paresthesia)": "tingling|pins and needles",
    "Violence, NOS": "injuries from an assault|being beaten up|an assault",
    "Uterine and vaginal bleeding": "vaginal bleeding",
    "Spotting, bleeding during pregnancy": "bleeding while pregnant|spotting in pregnancy",
    "Skin itching": "itching|itchy skin",
    "Unconscious on arrival": "being unconscious|loss of consciousness",
    "Altered level of consciousness": "altered consciousness|being hard to rouse",
    "State of consciousness not specified": "reduced awareness",
    "Cardiac arrest": "cardiac arrest|the heart has stopped",
    "Cardiopulmonary arrest": "cardiac arrest",
    "General psychiatric or psychological": "a mental health problem|a psychiatric crisis",
    "Behavioral disturbances": "disturbed behaviour|acting out",
    "Delusions or hallucinations": "hallucinations|hearing voices",
    "Hostile behavior": "aggressive behaviour|hostile behaviour",
    "Diseases of the esophagus, stomach": "stomach trouble|reflux",
    "Insect bite": "an insect bite|a bug bite",
    "Frequency and urgency of urination": "having to pee all the time",
    "General ill feeling": "feeling ill|feeling unwell",
    "Blood in urine (hematuria)": "blood in the urine|bloody pee",
    "Blood in stool (melena)": "blood in the stool|black stool",
    "Diminished vision": "blurry vision|poor vision",
    "Allergy, NOS": "an allergic reaction|an allergy",
    "Symptoms of fluid abnormalities": "dehydration|being dehydrated",
    "For results of blood glucose tests": "high blood sugar|abnormal blood sugar",
    "Migraine headache": "a migraine",
    "Cerebrovascular disease": "a possible stroke|stroke symptoms",
    "Nosebleed (epistaxis)": "a nosebleed",
    "Animal, human bite": "an animal bite|a dog bite",
    "Weakness (neurologic)": "weakness on one side|sudden weakness",
    "Slurring": "slurred speech",
    "Disorders of speech, speech disturbance": "trouble speaking|speech problems",
    "Ischemic heart disease": "a heart condition|coronary disease",
    "Head cold, upper respiratory": "a cold|a head cold",
    "Suture - insertion, removal": "stitches to come out|a stitch removal",
    "Increased heartbeat": "a racing heart|a fast heartbeat",
    "Irregular heartbeat": "an irregular heartbeat",
    "Vomiting blood (hematemesis)": "vomiting blood|throwing up blood",
    "Coughing up blood": "coughing up blood",
    "Retention of urine": "not being able to pee",
    "Difficulty in swallowing (dysphagia)": "trouble swallowing",
    "Gunshot wound": "a gunshot wound",
    "Burn, all degrees, to extremities": "a burn on the arm|a burned leg|a burn",
    "Infant crying too much, fussy": "constant crying",
    "Earache, pain": "an earache|ear pain",
    "Prophylactic inoculations": "a vaccination|a tetanus shot",
    "General medical examination": "a check-up|a physical",
    "Pregnancy, unconfirmed": "a possible pregnancy",
    "Symptoms of onset of labor": "labour contractions|going into labour",
    "Memory, disturbances of": "memory trouble|confusion",
    "Ingestion, inhalation, or exposure": "swallowing something harmful|exposure to a harmful substance",
}
_VAGUE = re.compile(
    r"^(oth|other|illegible|inadequate|problems, complaints|symptoms, |pain, specified)", re.I
)
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.I), form)
    for pattern, form in (
        (r"^(.+) pain, ache.*$", r"\1 pain|an aching \1|pain in the \1"),
        (r"^Injury, other and unspecified, of (\w+)", r"an injured \1|a hurt \1|\1 injury"),
        (r"^Swelling of (.+)$", r"a swollen \1|swelling of the \1"),
        (r"^Weakness of (.+)$", r"weakness in the \1|a weak \1"),
        (r"^Fracture/dislocation of (.+)$", r"a broken \1|a fractured \1"),
        (r"^Sprain and strain of (.+)$", r"a sprained \1"),
        (r"^(.+) symptoms$", r"a problem with the \1"),
        (r"^Laceration/cut.*$", r"a cut|a laceration"),
        (r"^Contusion.*$", r"bruising"),
    )
)


def lay_term(reason: str, rng: random.Random) -> str | None:
    """Words a person would use for `reason` after "has" or "with"; None if it says nothing."""
    if reason in _LAY:
        return rng.choice(_LAY[reason].split("|"))
    if _VAGUE.match(reason):
        return None
    for pattern, form in _RULES:
        if pattern.match(reason):
            chosen = rng.choice(form.split("|"))
            return pattern.sub(chosen, reason.lower())
    plain = re.sub(r"\(.*?\)", "", reason.lower()).replace(", nos", "").replace(", nec", "")
    return " ".join(plain.split(",")[0].split())
