# ruff: noqa: E501 - one sentence a line, however long
"""Frames that turn an emergency into something told, made up or taught: level 4.

`{matter}` is replaced by a sentence of an urgent level. The same sentence teaches level 0 when it
stands alone, so what is learnt is the frame.
"""

FRAMES = (
    "[Write|Continue|Finish] [a|my|the] [short story|scene|chapter|novel] that [begins|opens|starts] with: '{matter}'",
    "[Continue|Go on with|Pick up] [my|this|the] story[:| from here:] {matter}. [Nobody|Everyone|The dog] in the room moved.",
    "[Chapter|Part] [one|two|nine|12]. {matter}. [Please edit this draft|Too dramatic?|Does it read well?|Give notes on the style.]",
    '[Fiction|Novel|Thriller] draft: "{matter}," [she whispered|he shouted|the stranger said|Tom yelled]. [Improve the dialogue|Rewrite in past tense|Critique it]',
    "[Critique|Comment on|Edit|Polish] [the first line|this paragraph|the opening] of my [novel|short story|memoir|screenplay]: {matter}.",
    "[Screenplay|Script|Stage play], [int. kitchen - day|ext. street - night|act two]: {matter}. [Write what they say next|Add stage directions|Make it funnier]",
    "[Role play|Roleplay|Let's play a game|Pretend]: you are [a wizard|a detective|a ship's doctor|a dispatcher in a film], I am [a pirate|the captain|a knight], and {matter}. [Stay in character|Begin]",
    "[In the game|In our D&D campaign|In my visual novel|In the video game] {matter}. [What loot drops|Which dialogue option is best|Write the quest text]",
    "[In the film|In the series|In last night's episode|In the book I am reading] {matter}. [Was that the finale|Who plays the part|Explain the ending|Is it realistic?]",
    "[I dreamt|Last night I dreamed] that {matter}. [What does it mean|Interpret it|Turn it into a poem]",
    "[Song lyrics|A poem|A limerick|A haiku] [about|on] the line '{matter}', [please|rhyming|sad but short]",
    "[Homework|Exercise|Question 4|Worksheet]: {matter}. [Name the organ involved|Which law of physics applies|Underline the verb|Put it in the passive voice]",
    "[Exam|Quiz|Board review|Nursing school] question: {matter}. [What is the most likely diagnosis|Choose A, B, C or D|Explain the answer|Which step comes first]?",
    "[For my first aid course|For a training drill|For a simulation with actors|For a tabletop exercise] [write|invent|I need] a scenario [where|in which] {matter}.",
    "[Make|Write] [flash cards|a quiz|five multiple choice questions] [for my EMT class|for students|for revision] about the case: {matter}.",
    "[Grammar|Spelling] check[ please|]: '{matter}'. [It is an example in my textbook|The sentence is from a novel|I am learning English].",
    "[How do you say|How would one say|What is] '{matter}' in [German|Japanese|Latin|Italian][?| for my language class?| in a play?]",
    "[Classify|Label] the [sentiment|topic|intent] of this [sentence|test message|training example]: '{matter}'",
    "[Generate|Give me|Invent] [ten|20|a few] [test messages|synthetic examples|sample sentences] like '{matter}' [for my dataset|for unit tests|for a chatbot demo]",
    "[Headline|Breaking|News|From the newspaper]: {matter}, [police said on Tuesday|officials reported|witnesses told reporters|the paper writes]. [Summarise|Rewrite for children|Find a better headline|In plain English please]",
    "[Summarise|Shorten|Rewrite in simple words|Proofread|Make a tweet of] [this article|the report|this news item|the following]: [Authorities|Police|Rescuers|A spokesman] said [last week|on Monday|overnight] {matter}. [Dozens of neighbours watched|The cause is being investigated|Traffic was diverted for hours].",
    "[I read|I saw|They said on TV|On the radio they said] that [somewhere in Spain|in another city|overseas|in Canada] {matter}. [How common is that|What happened next|What is the latest|Sad story, what else is new]?",
    "[Did you hear|Have you heard], [some actor|a politician|a player|a celebrity] [was rushed to hospital|collapsed on stage|had surgery] [yesterday|last month], they say {matter}. [Who replaces him|What did the match end|Any gossip]?",
    "[Years ago|Back in 1998|When I was a child|Ten years ago] {matter}. [We all survived and laugh about it now|It ended well|That was long ago]. [Help me write it down|How do I tell that in a speech|Make a blog post of it]",
    "[The podcast|The documentary|The true crime show] [tells|begins with] how {matter}. [Recommend another|Is it a real case|Write a review]",
    "[A joke|Joke]: a man walks into a bar and says {matter}. [Finish it|Explain the punch line]",
    "[Marketing copy|Advert|Slogan] for [a first aid kit|a smoke alarm|a cough drop], [starting with|built around] '{matter}'",
    "[Debate|Essay] topic: should [bystanders film|phones be allowed|schools teach first aid] when {matter}? [Give both sides|Outline it|500 words]",
    "[History|Literature] class: in [the diary|the letter|the novel|the chronicle] {matter}. [Analyse the author's tone|In which century is it set|Cite the source]",
    "[What if|Suppose|Hypothetically,] {matter} [on Mars|in zero gravity|in the Middle Ages|in a submarine]? [It is for a sci-fi story|Purely curious|For my world building]",
)

BROKEN_THINGS = (
    "[my|the|our] [server|router|database|cluster|node|laptop|gpu|printer|build|pod|website] [just died|is dying|is choking on requests|is overheating|hangs and does not respond|bleeds memory|is on fire again, 100 % load|has no heartbeat|flatlined after the update|went unresponsive|keeps crashing|was killed by the kernel], [which log do I read|what now|how do I debug it|is it the disk|fix please|should I restart it]",
    "[the process|the parent|the daemon|a child process|the job|the thread] [was killed|hangs|dies with signal 9|is a zombie|stopped responding|won't terminate], [how do I kill it|how do I trace it|why|give me the command]",
    "[timeout|deadlock|segfault|panic|stack overflow|split brain|heartbeat lost] [in production|between two nodes|after the deploy|on startup], [explain|what does it mean|how do I recover|who votes for the leader]?",
    "my [car|bike|boiler|fridge|phone|dishwasher] [died|is dead|leaks|smells odd|makes a rattling noise|won't start], [is it the battery|cheap fix|can I still sell it|who repairs that]?",
)

FIGURES_OF_SPEECH = (
    "[my heart|my soul] [is broken|bleeds|stopped|sank], [we lost the final|she said no|the show got cancelled|the concert is sold out]",
    "[that|this|the] [curry|chili|ramen|salsa|pepper] [set my mouth on fire|burned a hole in me|nearly killed me], [so good|10 out of 10|what milk helps|haha]",
    "[I'm|we are] [dead|dying|choking|crying|screaming] [at this meme|at that video|at his haircut|laughing], [caption it|send another]",
    "[the exam|monday|this deadline|my inbox|leg day] [killed|murdered|destroyed|crushed|strangled] me, [cheer me up|what do you do to relax]",
    "[he|she|my team|the goalie] [choked|bled points|got slaughtered|was on fire|got burned] in the [final|second half|debate], [who was best|next match when]?",
    "[I have a|got] [killer|deadly|fatal] [headline|idea|hangover joke|weakness for cake|crush], [rate it|help]",
)
